"""Two sides on the same items: the difference of a metric, how sure it is, and a test of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from posttrain.evaluation.comparisons import mcnemar, odds_ratio, paired_rates, standardised_difference
from posttrain.evaluation.scores import DRAWS, ItemScores, Kind, combine, resampled_sums
from posttrain.evaluation.statistics import Difference, Estimate
from posttrain.evaluation.text_metrics import Better

_ROUNDING = 1e-12
"""Differences below this share of the values themselves are none."""


@dataclass(frozen=True)
class Paired:
    """B against A in one metric."""

    metric: str
    kind: Kind
    better: Better
    a: float
    b: float
    difference: Difference
    """B minus A with its 95% interval."""
    p: float
    test: Literal["McNemar, exact", "t"]
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
        if not self.corrected < 0.05 or not self.difference.value or self.better == "neither":
            return None
        return "B" if (self.difference.value > 0) == (self.better == "higher") else "A"

    def with_correction(self, corrected: float) -> "Paired":
        return replace(self, corrected=corrected)


def paired(
    metric: str,
    better: Better,
    a: Sequence[ItemScores],
    b: Sequence[ItemScores],
    items: Sequence[str],
    seed: int = 0,
    draws: int = DRAWS,
) -> Paired:
    """B minus A in `metric` on `items`, which every run of both sides has; ValueError with fewer than two items.

    The value of a side is the mean over its runs. With one run a side and answers that are right or wrong, the test is
    McNemar's and the interval Newcombe's for pairs. Otherwise both are Student's, with the variance of a bootstrap over
    items (the same ones for all runs) and that between the runs of a side (see `t_test`).
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
        np.mean([combine(kind, resampled_sums(run.table(items), seed, draws)) for run in side], axis=0)
        for side in (a, b)
    )
    over_items = float(np.var(drawn_b - drawn_a)) * len(items) / (len(items) - 1)
    difference, p = t_test(totals_a, totals_b, over_items, len(items))
    if kind == "rate":
        difference = replace(difference, low=max(difference.low, -1.0), high=min(difference.high, 1.0))
    dz = None
    if kind in ("rate", "mean"):
        dz = standardised_difference((np.mean(values_b, axis=0) - np.mean(values_a, axis=0)).tolist(), seed)
    return Paired(metric, kind, better, value_a, value_b, difference, p, "t", len(items), runs, dz)


def t_test(a: Sequence[float], b: Sequence[float], over_items: float, n: int) -> tuple[Difference, float]:
    """Mean of `b` minus mean of `a`, the values of the runs of two sides, with Student's t interval and two-sided p.

    `over_items`: variance of the difference over draws of the `n` items. The squared standard error is that plus, of
    each side of R runs, s^2 / R, s^2 being the variance between its runs with divisor R - 1; the degrees of freedom are
    Welch and Satterthwaite's (Satterthwaite 1946) of these parts, with n - 1 and R - 1. Where one side alone has a
    single run, its variance is taken to be the other's (Student's test with one value on a side), and the degrees of
    freedom are at most the other's R - 1. Where both have, no variance of training is in it. p is at least 2^(1 - n),
    the least that the signs of n differences can give.
    """
    from scipy.special import stdtr, stdtrit

    value_a, value_b = float(np.mean(a)), float(np.mean(b))
    value = value_b - value_a
    parts, most = [(over_items, n - 1)], n - 1
    if min(len(a), len(b)) > 1:
        parts += [(float(np.var(side, ddof=1)) / len(side), len(side) - 1) for side in (a, b)]
    elif max(len(a), len(b)) > 1:
        several = max(a, b, key=len)
        most = len(several) - 1
        parts.append((float(np.var(several, ddof=1)) * (1 / len(several) + 1), most))
    scale = max(abs(value_a), abs(value_b))
    variance = math.fsum(part for part, _ in parts)
    if variance <= (_ROUNDING * scale) ** 2:
        return Difference(value, value, value), 1.0 if abs(value) <= _ROUNDING * scale else 2.0 ** (1 - n)
    # Shares of the variance, for the square of a tiny one is 0.
    freedom = 1 / math.fsum((part / variance) ** 2 / own for part, own in parts)
    freedom = min(freedom, most) if 1 in (len(a), len(b)) else freedom
    error = math.sqrt(variance)
    half = float(stdtrit(freedom, 0.975)) * error
    p = 1.0 if abs(value) <= _ROUNDING * scale else 2 * float(stdtr(freedom, -abs(value) / error))
    return Difference(value, value - half, value + half), min(1.0, max(p, 2.0 ** (1 - n)))


def _binary(values: np.ndarray) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())
