"""The mean of training seeds by tasks."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.runs.intervals import FEWEST_SEEDS, Estimate, beta_skewness, skewed_limits, success_rate


def crossed_mean(table: npt.ArrayLike, rate: bool = False) -> Estimate:
    """Mean of a table [training seeds, tasks] with a 95% interval over both; `n` is the number of training seeds.

    The variance of the mean of S seeds and T tasks is (A + B - C) / S T, with the mean squares A between seeds, B between
    tasks and C of the rest in an analysis of variance, and at least A / S T and B / S T. The interval is Student's t with the
    degrees of freedom of Satterthwaite (1946) for A and B, at least S - 1; of success rates (`rate`) joined with
    Johnson's, as in `seed_mean`, and clipped to [0, 1]. If all results are 0, or all are 1, the limits are those of a rate
    over the tasks. For other equal values, and for fewer than 5 seeds or 2 tasks, they are NaN.
    """
    values: Any = np.asarray(table, dtype=np.float64)
    if values.ndim != 2 or 0 in values.shape:
        raise ValueError(f"the table must have a row per training seed and a column per task, got shape {values.shape}")
    (seeds, tasks), center = values.shape, float(values.mean())
    if rate and not np.ptp(values) and center in (0.0, 1.0):
        known = success_rate(round(center) * tasks, tasks)
        return Estimate(center, known.low, known.high, seeds)
    if seeds < FEWEST_SEEDS or tasks < 2 or not np.ptp(values):
        return Estimate(center, math.nan, math.nan, seeds)
    rows, columns = values.mean(1), values.mean(0)
    rest = float(((values - rows[:, None] - columns + center) ** 2).sum()) / ((seeds - 1) * (tasks - 1))
    parts = [(tasks * float(rows.var(ddof=1)), seeds - 1), (seeds * float(columns.var(ddof=1)), tasks - 1)]
    square = max(parts[0][0] + parts[1][0] - rest, parts[0][0], parts[1][0])
    freedom = square**2 / sum(part**2 / degrees for part, degrees in parts)
    variance = square / tasks  # of a seed, if the seeds alone had that of the mean
    skewness = beta_skewness(center, min(variance, center * (1 - center))) if rate else 0.0
    limits = skewed_limits(center, math.sqrt(variance), skewness, seeds, max(int(freedom), seeds - 1))
    low, high = np.clip(limits, 0, 1) if rate else limits
    return Estimate(center, float(low), float(high), seeds)
