"""Paired tests: the difference of two sides in one metric on the items that both have, with its interval and p-value."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from posttrain.evaluation.results import Better
from posttrain.evaluation.statistics import (
    DRAWS,
    Difference,
    ItemScores,
    Kind,
    combine,
    mcnemar,
    odds_ratio,
    paired_rates,
    resampled_sums,
    standardized_difference,
)
from posttrain.recipe.detectable import LEVEL, mcnemar_power, smallest, t_shown
from posttrain.runs.intervals import Estimate, t_limits

_ROUNDING = 1e-12
"""Differences below this fraction of the values count as zero."""


@dataclass(frozen=True)
class PairedTest:
    """The comparison of side B with side A in one metric."""

    metric: str
    kind: Kind
    better: Better
    a: float
    b: float
    difference: Difference
    """B minus A with its 95% interval."""
    p: float
    test: Literal["McNemar, exact", "t", "t, paired by training seed"]
    n: int
    """Number of items."""
    runs: tuple[int, int]
    """Number of runs of A and of B."""
    effect: Estimate | None = None
    """Odds ratio of the discordant items for McNemar's test, else Cohen's d_z; None if neither is meaningful."""
    corrected: float = math.nan
    """p after Holm's correction over all tests of the comparison."""

    @property
    def better_side(self) -> Literal["A", "B"] | None:
        """The better side, if the difference is significant at 5% after correction."""
        if not self.corrected < 0.05 or not self.difference.value or self.better == "neither":
            return None
        return "B" if (self.difference.value > 0) == (self.better == "higher") else "A"

    def text(self, value: float, signed: bool = False) -> str:
        """A value or, `signed`, a difference of the metric, as text; rates are percentages."""
        sign = "+" if signed else ""
        if self.kind == "rate":
            return f"{100 * value:{sign}.1f}{' pp' if signed else '%'}"
        text = f"{value:{sign}.{4 if self.kind == 'mean' and abs(value) < 100 else 2}f}"
        return text if float(text) or not value else f"{value:{sign}.1e}"

    @property
    def limits(self) -> str:
        """The interval of the difference, as text; a dash if it is unknown."""
        if math.isnan(self.difference.low):
            return "–"
        limits = (self.difference.low, self.difference.high)
        return f"[{', '.join(self.text(limit, True).removesuffix(' pp') for limit in limits)}]"

    def visible(self, level: float = LEVEL) -> float:
        """The smallest difference that a comparison like this one shows in 80% of cases: of McNemar's test, with the share of
        items that differed here; of Student's, with its standard error. Infinite if there is none, NaN if it is unknown.
        """
        if 2.0 ** (1 - self.n) >= level:
            return math.inf
        if self.test.startswith("McNemar"):
            differing = 0 if self.effect is None else self.effect.n

            def power(difference: float) -> float:
                share = max(differing / self.n, difference)
                return mcnemar_power((share + difference) / 2, (share - difference) / 2, self.n, level)

            return smallest(power, 1.0)
        size = self.difference.error * t_shown(self.difference.freedom, level)
        return math.inf if self.kind == "rate" and size > 1 else size

    @property
    def effect_text(self) -> str:
        """The effect with its interval, as text; a dash if it is unknown."""
        if self.effect is None or math.isnan(self.effect.value):
            return "–"
        name = "OR" if self.test.startswith("McNemar") else "d_z"
        limits = "" if math.isnan(self.effect.low) else f"\n[{self.effect.low:.2f}, {self.effect.high:.2f}]"
        return f"{name} {self.effect.value:.2f}{limits}"

    @property
    def p_text(self) -> str:
        """The corrected p-value, as text."""
        p = self.corrected
        return f"{p:.4f}" if p >= 0.0001 else f"{p:.1e}" if p >= 1e-16 else "<1e-16"


def paired_test(
    metric: str,
    better: Better,
    a: Sequence[ItemScores],
    b: Sequence[ItemScores],
    items: Sequence[str],
    seed: int = 0,
    draws: int = DRAWS,
    paired: bool = False,
) -> PairedTest:
    """Test B minus A in `metric` on `items`, which all runs of both sides must have.

    The value of a side is the mean over its runs, of perplexities the geometric mean: they are tested as nats per token, and
    the limits of the difference are those of the ratio B / A at the value of A. For one run per side and binary scores, the
    test is McNemar's and the interval Newcombe's for pairs. Otherwise both are Student's, with the variance over items (bootstrap, with the same
    items for all runs) and between the runs of a side (see `t_test`). `paired`: the runs of both sides have the same training
    seeds, in the same order. Raises `ValueError` for fewer than two items.
    """
    if len(items) < 2:
        raise ValueError(f"a comparison needs two items, got {len(items)}")
    kind: Kind = "mean" if "mean" in {run.kind for run in (*a, *b)} else a[0].kind
    values_a, values_b = ([combine(kind, run.table(items)) for run in side] for side in (a, b))
    # Perplexities are compared as nats per token, since exp lets a few rows outweigh the others.
    unit: Kind = "mean" if kind == "perplexity" else kind
    totals_a, totals_b = ([float(combine(unit, run.table(items).sum(0))) for run in side] for side in (a, b))
    value_a, value_b = float(np.mean(totals_a)), float(np.mean(totals_b))
    runs = (len(a), len(b))
    if kind == "rate" and runs == (1, 1) and np.isin([*values_a, *values_b], (0.0, 1.0)).all():
        only_a = int(((values_a[0] == 1) & (values_b[0] == 0)).sum())
        only_b = int(((values_a[0] == 0) & (values_b[0] == 1)).sum())
        difference = paired_rates(values_a[0].tolist(), values_b[0].tolist())
        p, effect = mcnemar(only_a, only_b), odds_ratio(only_a, only_b)
        return PairedTest(
            metric, kind, better, value_a, value_b, difference, p, "McNemar, exact", len(items), runs, effect
        )
    drawn_a, drawn_b = (
        np.mean([combine(unit, resampled_sums(run.table(items), seed, draws)) for run in side], axis=0)
        for side in (a, b)
    )
    over_items = float(np.var(drawn_b - drawn_a)) * len(items) / (len(items) - 1)
    difference, p = t_test(totals_a, totals_b, over_items, len(items), paired)
    if kind == "perplexity":
        value_a, value_b = np.exp((value_a, value_b)).tolist()
        low, high = (value_a * np.expm1((difference.low, difference.high))).tolist()
        difference = Difference(value_b - value_a, low, high, value_a * difference.error, difference.freedom)
    if kind in ("rate", "mean"):
        # No difference is larger than that of the smallest and the largest value.
        width = 1.0 if kind == "rate" else float(np.ptp(np.concatenate([np.ravel(v) for v in (*values_a, *values_b)])))
        low, high = np.clip((difference.low, difference.high), -width, width).tolist()
        difference = replace(difference, low=low, high=high)
    dz = None
    if kind in ("rate", "mean"):
        dz = standardized_difference((np.mean(values_b, axis=0) - np.mean(values_a, axis=0)).tolist())
        if runs != (1, 1):  # its interval is over items alone, unlike p
            dz = replace(dz, low=math.nan, high=math.nan)
    test: Literal["t", "t, paired by training seed"] = "t, paired by training seed" if paired else "t"
    return PairedTest(metric, kind, better, value_a, value_b, difference, p, test, len(items), runs, dz)


def t_test(
    a: Sequence[float], b: Sequence[float], over_items: float, n: int, paired: bool = False
) -> tuple[Difference, float]:
    """Mean of `b` minus mean of `a` (one value per run) with Student's t interval, and the two-sided p-value.

    `over_items`: variance of the difference over bootstrap samples of the `n` items. The squared standard error is
    `over_items` plus s^2 / R for each side with R runs, where s^2 is the variance between runs with divisor R - 1; if the
    runs of both sides are `paired`, plus that of their differences alone, since a seed decides on tasks and samples. The
    degrees of freedom are those of Welch and Satterthwaite (Satterthwaite 1946) for these terms, with n - 1 and R - 1.
    If only one side has a single run, its variance is assumed equal to that of the other side, and the degrees of
    freedom are at most the other side's R - 1. If both have a single run, the variance of training is not included.
    p is at least 2^(1 - n), the smallest p-value of a sign test on n differences. Without any variance, the limits are NaN.
    """
    from scipy.special import stdtr

    value_a, value_b = float(np.mean(a)), float(np.mean(b))
    value = value_b - value_a
    parts, most = [(over_items, n - 1)], n - 1
    if paired and len(a) > 1:
        parts.append((float(np.var(np.subtract(b, a), ddof=1)) / len(a), len(a) - 1))
    elif min(len(a), len(b)) > 1:
        parts += [(float(np.var(side, ddof=1)) / len(side), len(side) - 1) for side in (a, b)]
    elif max(len(a), len(b)) > 1:
        several = max(a, b, key=len)
        most = len(several) - 1
        parts.append((float(np.var(several, ddof=1)) * (1 / len(several) + 1), most))
    scale = max(abs(value_a), abs(value_b))
    variance = math.fsum(part for part, _ in parts)
    if variance <= (_ROUNDING * scale) ** 2:
        return Difference(value, math.nan, math.nan), 1.0 if abs(value) <= _ROUNDING * scale else 2.0 ** (1 - n)
    # Use fractions of the variance, because the square of a tiny variance underflows.
    freedom = 1 / math.fsum((part / variance) ** 2 / degrees for part, degrees in parts)
    freedom = min(freedom, most) if 1 in (len(a), len(b)) else freedom
    error = math.sqrt(variance)
    p = 1.0 if abs(value) <= _ROUNDING * scale else 2 * float(stdtr(freedom, -abs(value) / error))
    return Difference(value, *t_limits(value, error, freedom), error, freedom), min(1.0, max(p, 2.0 ** (1 - n)))
