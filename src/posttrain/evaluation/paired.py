"""Two sides on the same items: the difference of a metric, how sure it is, and a test of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from posttrain.evaluation.comparisons import mcnemar, odds_ratio, paired_rates, standardised_difference
from posttrain.evaluation.scores import ItemScores, Kind, combine, resampled_sums
from posttrain.evaluation.statistics import Difference, Estimate
from posttrain.seeds import random_stream

DRAWS = 5_000
"""Bootstrap resamples; the smallest p-value is one in that many."""


@dataclass(frozen=True)
class Paired:
    """B against A in one metric."""

    metric: str
    kind: Kind
    better: Literal["higher", "lower"]
    a: float
    b: float
    difference: Difference
    """B minus A with its 95% interval."""
    p: float
    test: Literal["McNemar, exact", "bootstrap"]
    n: int
    """Items."""
    runs: tuple[int, int]
    """Runs of A and of B."""
    effect: Estimate | None = None
    """Odds ratio of the discordant items for McNemar's test, else Cohen's d_z; None where neither means anything."""
    corrected: float = math.nan
    """p after Holm's correction over all comparisons of a report."""

    @property
    def better_side(self) -> Literal["A", "B"] | None:
        """Which side is better, where that can be told at 5% after correction."""
        if not self.corrected < 0.05 or not self.difference.value:
            return None
        return "B" if (self.difference.value > 0) == (self.better == "higher") else "A"

    def with_correction(self, corrected: float) -> "Paired":
        return replace(self, corrected=corrected)


def paired(
    metric: str,
    better: Literal["higher", "lower"],
    a: Sequence[ItemScores],
    b: Sequence[ItemScores],
    items: Sequence[str],
    seed: int = 0,
    draws: int = DRAWS,
) -> Paired:
    """B minus A in `metric` on `items`, which every run of both sides has; ValueError with fewer than two items.

    The value of a side is the mean over its runs. With one run a side and answers that are right or wrong, the test is
    McNemar's and the interval Newcombe's for pairs. Otherwise both are a bootstrap over items, the same ones for all
    runs, and within each side over its runs (see `run_draws`); p = (1 + #{|d* - d| >= |d|}) / (1 + draws).
    """
    if len(items) < 2:
        raise ValueError(f"a comparison needs two items, got {len(items)}")
    kind: Kind = "mean" if "mean" in {run.kind for run in (*a, *b)} else a[0].kind
    values_a, values_b = ([combine(kind, run.table(items)) for run in side] for side in (a, b))
    totals_a, totals_b = ([float(combine(kind, run.table(items).sum(0))) for run in side] for side in (a, b))
    value_a, value_b = float(np.mean(totals_a)), float(np.mean(totals_b))
    runs = (len(a), len(b))
    if kind == "rate" and runs == (1, 1) and _binary(values_a[0]) and _binary(values_b[0]):
        only_a = int(((values_a[0] == 1) & (values_b[0] == 0)).sum())
        only_b = int(((values_a[0] == 0) & (values_b[0] == 1)).sum())
        difference = paired_rates(values_a[0].tolist(), values_b[0].tolist())
        p, effect = mcnemar(only_a, only_b), odds_ratio(only_a, only_b)
        return Paired(metric, kind, better, value_a, value_b, difference, p, "McNemar, exact", len(items), runs, effect)
    drawn_a, drawn_b = (
        run_draws([combine(kind, resampled_sums(run.table(items), seed, draws)) for run in side], name, seed)
        for side, name in ((a, "a"), (b, "b"))
    )
    drawn, value = drawn_b - drawn_a, value_b - value_a
    low, high = np.quantile(drawn, [0.025, 0.975])
    difference = Difference(value, min(float(low), value), max(float(high), value))
    # A whit of room, for sums in another order differ by rounding.
    extreme = np.abs(drawn - value) >= abs(value) - 1e-12 * max(abs(value_a), abs(value_b), 1e-300)
    p = (1 + int(extreme.sum())) / (1 + draws)
    dz = None
    if kind in ("rate", "mean"):
        dz = standardised_difference((np.mean(values_b, axis=0) - np.mean(values_a, axis=0)).tolist(), seed)
    return Paired(metric, kind, better, value_a, value_b, difference, p, "bootstrap", len(items), runs, dz)


def run_draws(values: Sequence[np.ndarray], name: str, seed: int) -> np.ndarray:
    """[draws]: the mean over runs drawn with replacement, of `values`: per run [draws], one for each draw of items.

    Resampling R runs shows (R - 1) / R of the variance between them, so their deviations are scaled by
    sqrt(R / (R - 1)). One run shows nothing of it, and stays as it is.
    """
    table = np.stack(values, axis=1)
    draws, count = table.shape
    if count == 1:
        return table[:, 0]
    chosen = random_stream("runs", name, seed).integers(count, size=(draws, count))
    centre = table.mean(axis=1)
    resampled = np.take_along_axis(table, chosen, axis=1).mean(axis=1)
    return centre + math.sqrt(count / (count - 1)) * (resampled - centre)


def _binary(values: np.ndarray) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())
