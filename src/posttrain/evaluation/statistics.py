"""Estimates with 95% intervals, tests of differences, and scores per item that can be resampled.

Every reported number has its n and one of these intervals. `ItemScores` keeps a metric as summands per item, because
corpus metrics such as BLEU are not means of sentence scores: BLEU is computed from counts summed over sentences.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from posttrain.plugins import require_module
from posttrain.runs.intervals import ROUNDING, Estimate, clustered_rate, mean, rate_limits, success_rate, t_limits
from posttrain.seeds import random_stream


@dataclass(frozen=True)
class Difference:
    """A difference with its 95% interval; limits are NaN if unknown."""

    value: float
    low: float
    high: float
    error: float = math.nan
    """The standard error; NaN if the limits do not come from one."""
    freedom: float = math.nan
    """Its degrees of freedom."""


def ratio(sums: Sequence[float], counts: Sequence[float]) -> Estimate:
    """sum(sums) / sum(counts), such as nats per token, over n independent rows; both are positive.

    Student's t interval of the logarithm. The standard error is the jackknife's about the ratio, which counts that a long
    row pulls the ratio to itself (MacKinnon and White 1985, HC3). Rows of unequal counts are as informative as
    (sum counts)^2 / sum counts^2 equal ones (Kish 1965), which are the degrees of freedom, less one. The limits are NaN
    where they are as informative as fewer than 3, and for rows whose ratios are equal.
    """
    above, below = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    n = len(above)
    if n < 1 or len(below) != n or below.sum() <= 0:
        raise ValueError(
            f"invalid ratio: {n} sums, {len(below)} counts; counts must have the same length and a positive sum"
        )
    total = float(below.sum())
    value = float(above.sum()) / total
    freedom = total**2 / float((below**2).sum()) - 1
    if freedom < 2 - ROUNDING or value <= 0:
        return Estimate(value, math.nan, math.nan, n)
    error = math.sqrt((n - 1) / n * float((((above - value * below) / (total - below)) ** 2).sum()))
    if error <= ROUNDING * value:
        return Estimate(value, math.nan, math.nan, n)
    low, high = (value * math.exp(limit) for limit in t_limits(0.0, error / value, freedom))
    return Estimate(value, low, high, n)


def probability_above(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> Estimate:
    """Probability that a result of `a` is above one of `b`, the mean over environments; a tie counts half.

    `a[e]`, `b[e]`: results in environment e, such as the final success of training runs; then it is the probability of
    improvement of Agarwal et al. (2021, arXiv 2108.13264). Of one environment, it is the area under the ROC curve (Mann and
    Whitney 1947). The interval is that of a rate (see `clustered_rate`) with the variance of DeLong et al. (1988), and at
    least as many trials as the smaller side has results, because so many pairs are independent. `n`: results of both sides.
    """
    sides = [[np.asarray(results, dtype=np.float64) for results in side] for side in (a, b)]
    if not sides[0] or len(sides[0]) != len(sides[1]):
        raise ValueError(f"the sides must have the same environments, got {len(a)} and {len(b)}")
    if not min(len(results) for side in sides for results in side):
        raise ValueError("each side needs a result in every environment")
    wins = [
        (x[:, None] > y[None, :]) + 0.5 * (x[:, None] == y[None, :]) for x, y in zip(sides[0], sides[1], strict=True)
    ]
    value = float(np.mean([table.mean() for table in wins]))
    fewest = len(wins) * min(min(table.shape) for table in wins)
    # A single result and pairs that are alike show no spread. The largest is that of pairs that are all right or all wrong.
    spread = [
        float(table.mean(1 - axis).var(ddof=1) if size > 1 and np.ptp(table) else table.mean() * (1 - table.mean()))
        for table in wins
        for axis, size in enumerate(table.shape)
    ]
    sizes = [size for table in wins for size in table.shape]
    variance = sum(v / size for v, size in zip(spread, sizes, strict=True)) / len(wins) ** 2
    low, high = rate_limits(value, variance * fewest, fewest, sum(table.size for table in wins))
    return Estimate(value, low, high, sum(sizes))


@dataclass(frozen=True)
class CalibrationBin:
    """Pairs whose predicted probability lies in [`low`, `high`], a part of [0.5, 1]."""

    low: float
    high: float
    confidence: float
    """Mean predicted probability that the answer with the larger reward is the chosen one."""
    accuracy: Estimate
    """Fraction of pairs in which this answer is the chosen one; ties count half."""


def pair_accuracy(margins: Sequence[float] | np.ndarray) -> Estimate:
    """Fraction of pairs with a positive margin (reward of chosen minus rejected); ties count half."""
    values = np.asarray(margins, dtype=np.float64)
    return clustered_rate(list((np.sign(values) + 1) / 2), len(values))


def calibration(margins: Sequence[float], bins: int = 5) -> tuple[list[CalibrationBin], float]:
    """Equal-width bins of the predicted probability, and the expected calibration error (Guo et al. 2017).

    A Bradley-Terry model predicts that the answer with the larger reward is chosen with probability sigmoid(|margin|).
    The error is the mean over pairs of |confidence - accuracy| of their bin. Empty bins are omitted.
    """
    values = np.asarray(margins, dtype=np.float64)
    confidence = 1 / (1 + np.exp(-np.abs(values)))
    index = np.minimum(((confidence - 0.5) * 2 * bins).astype(int), bins - 1)
    calibration, error = [], 0.0
    for number in range(bins):
        inside = index == number
        n = int(inside.sum())
        if not n:
            continue
        right = pair_accuracy(values[inside])
        mean = float(confidence[inside].mean())
        calibration.append(CalibrationBin(0.5 + number / 2 / bins, 0.5 + (number + 1) / 2 / bins, mean, right))
        error += n / len(values) * abs(mean - right.value)
    return calibration, error if len(values) else math.nan


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided p-value of McNemar's exact test (McNemar 1947).

    `only_a`, `only_b`: items that only A, or only B, got right. Under the null hypothesis each of the n = only_a +
    only_b discordant items is A's or B's with probability 1/2, so p = min(1, 2 P(X <= min(only_a, only_b))) with
    X ~ Binomial(n, 1/2). Without discordant items, p = 1.
    """
    from scipy.special import bdtr

    n = only_a + only_b
    return min(1.0, 2 * float(bdtr(min(only_a, only_b), n, 0.5))) if n else 1.0


def paired_rates(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Rate of `b` minus rate of `a` (values 0 or 1 on the same items) with Newcombe's interval for pairs.

    Newcombe 1998 (Statistics in Medicine 17, 2635), method 10: combines the limits of both rates, here those of
    `success_rate`, and subtracts a term for their correlation phi, whose numerator has a continuity correction.
    """
    first, second = np.asarray(a, dtype=bool), np.asarray(b, dtype=bool)
    n = len(first)
    if n < 1 or len(second) != n:
        raise ValueError(f"paired values must have equal, positive lengths, got {n} and {len(second)}")
    one, other = success_rate(int(second.sum()), n), success_rate(int(first.sum()), n)
    both, neither = int((first & second).sum()), int((~first & ~second).sum())
    only_a, only_b = int((first & ~second).sum()), int((~first & second).sum())
    scale = math.sqrt(first.sum() * (~first).sum() * second.sum() * (~second).sum())
    excess = both * neither - only_a * only_b
    phi = (max(excess - n / 2, 0) if excess > 0 else excess) / scale if scale else 0.0
    down, up = one.value - one.low, other.high - other.value
    low = math.sqrt(max(down**2 - 2 * phi * down * up + up**2, 0))
    down, up = other.value - other.low, one.high - one.value
    high = math.sqrt(max(down**2 - 2 * phi * down * up + up**2, 0))
    difference = one.value - other.value
    return Difference(difference, difference - low, difference + high)


def odds_ratio(only_a: int, only_b: int) -> Estimate:
    """Conditional odds ratio of paired rates, only_b / only_a, with the exact interval of `success_rate` as odds.

    Infinite if `only_a` is 0, NaN without discordant items. `n` is the number of discordant items.
    """
    n = only_a + only_b
    if not n:
        return Estimate(math.nan, math.nan, math.nan, 0)
    rate = success_rate(only_b, n)
    value, *limits = (p / (1 - p) if p < 1 else math.inf for p in (rate.value, rate.low, rate.high))
    return Estimate(value, limits[0], limits[1], n)


def standardized_difference(differences: Sequence[float]) -> Estimate:
    """Cohen's d_z of paired differences, mean / standard deviation (divisor n - 1; Cohen 1988).

    Student's t interval with the variance of the delta method, that of z - d (z^2 - (n - 1) / n) / 2 over items, where z
    are the standardized differences, and at least that of the mean. The value is NaN for fewer than two differences, or if they are equal up to rounding,
    and the limits are NaN for fewer than three.
    """
    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    deviation = float(values.std(ddof=1)) if n > 1 else 0.0
    if not deviation or np.ptp(values) <= ROUNDING * np.abs(values).max():
        return Estimate(math.nan, math.nan, math.nan, n)
    value = float(values.mean()) / deviation
    if n < 3:
        return Estimate(value, math.nan, math.nan, n)
    z = (values - values.mean()) / deviation
    # At least that of the mean: few unequal items look certain to the delta method, and Student's test does not.
    error = max(float((z - value * z**2 / 2).std(ddof=1)), 1.0) / math.sqrt(n)
    return Estimate(value, *t_limits(value, error, n - 1), n)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's corrected p-values of a family of tests (Holm 1979), in the given order.

    The i-th smallest of m (from 1) is multiplied by m - i + 1. The results are made monotone and at most 1.
    """
    m = len(p_values)
    adjusted, least = [0.0] * m, 0.0
    for rank, index in enumerate(sorted(range(m), key=lambda i: p_values[i])):
        least = max(least, min(1.0, (m - rank) * p_values[index]))
        adjusted[index] = least
    return adjusted


Kind = Literal["rate", "mean", "perplexity", "bleu", "chrf"]
"""Summands per item: (value, 1) for `rate` and `mean`, (nats, tokens) for `perplexity`, sacrebleu's counts for `bleu`
and `chrf`."""

DRAWS = 5_000
"""Bootstrap resamples."""


@dataclass(frozen=True)
class ItemScores:
    """The summands of one metric: item -> [S] float64."""

    kind: Kind
    items: Mapping[str, np.ndarray]
    bounds: tuple[float, float] | None = None
    """The least and the greatest possible value of a `mean`; None if unknown."""

    def __len__(self) -> int:
        return len(self.items)

    def table(self, names: Sequence[str] | None = None) -> np.ndarray:
        """[n, S] float64: the summands of the items `names` (default: all items in their order)."""
        return np.stack([self.items[name] for name in (self.items if names is None else names)])

    def values(self, names: Sequence[str] | None = None) -> np.ndarray:
        """[n] float64: the metric of each item alone."""
        return combine(self.kind, self.table(names))


def item_means(
    kind: Literal["rate", "mean"] | None,
    samples: Iterable[tuple[str, float]],
    bounds: tuple[float, float] | None = None,
) -> ItemScores:
    """Mean over the samples of each item, so that all items have the same weight; `bounds` are those of the result.

    `kind` None: a rate if all samples are 0 or 1.
    """
    by_item: dict[str, list[float]] = {}
    for item, value in samples:
        by_item.setdefault(item, []).append(float(value))
    kind = kind or ("rate" if {value for values in by_item.values() for value in values} <= {0.0, 1.0} else "mean")
    items = {item: np.array([math.fsum(values) / len(values), 1.0]) for item, values in by_item.items()}
    return ItemScores(kind, items, bounds)


def item_sums(kind: Kind, samples: Iterable[tuple[str, Sequence[float]]]) -> ItemScores:
    """Sum of the summands [S] over the samples of each item."""
    totals: dict[str, np.ndarray] = {}
    for item, summands in samples:
        totals[item] = totals.get(item, 0.0) + np.asarray(summands, dtype=np.float64)
    return ItemScores(kind, totals)


def combine(kind: Kind, sums: np.ndarray) -> np.ndarray:
    """The metric [...] from summands [..., S]: sum / count, exp(nats / tokens), or BLEU or chrF in [0, 100]."""
    if kind in ("rate", "mean", "perplexity"):
        ratio = sums[..., 0] / sums[..., 1]
        return np.exp(ratio) if kind == "perplexity" else ratio
    metric = sacrebleu_metric(kind)
    flat = sums.reshape(-1, sums.shape[-1])
    scores = [metric._compute_score_from_stats([round(count) for count in row]).score for row in flat]
    return np.array(scores).reshape(sums.shape[:-1])


def estimate(scores: ItemScores) -> Estimate:
    """The metric over all items with a 95% interval over items.

    Rates have the interval of `clustered_rate`, means that of `mean`, perplexities exp of that of `ratio`. BLEU and chrF
    have Student's t interval with the standard error of the jackknife. Except for a rate, the limits are NaN for a single
    item and for items that are alike.
    """
    if not len(scores):
        raise ValueError("an estimate needs at least one item")
    table, n = scores.table(), len(scores)
    if scores.kind == "rate":
        rates = scores.values()
        # The number of samples per item is unknown. Items that are alike do not show that it is large.
        return clustered_rate(rates.tolist(), math.inf if np.ptp(rates) else n)
    if scores.kind == "mean":
        return mean(scores.values().tolist(), scores.bounds)
    if scores.kind == "perplexity":
        nats = ratio(*table.T.tolist())
        value, low, high = np.exp([nats.value, nats.low, nats.high]).tolist()
        return Estimate(value, low, high, n)
    value = float(combine(scores.kind, table.sum(0)))
    if n == 1:
        return Estimate(value, math.nan, math.nan, 1)
    without = combine(scores.kind, table.sum(0) - table)
    error = math.sqrt((n - 1) ** 2 / n * float(without.var(ddof=1)))
    if error <= ROUNDING * abs(value):
        return Estimate(value, math.nan, math.nan, n)
    low, high = t_limits(value, error, n - 1)
    return Estimate(value, max(0.0, low), min(100.0, high), n)


def resampled_sums(table: np.ndarray, seed: int = 0, draws: int = DRAWS) -> np.ndarray:
    """[draws, S]: sums over the items of bootstrap samples of `table` [n, S].

    The drawn items depend only on n and `seed`, so tables of the same items get the same samples.
    """
    n = len(table)
    generator = random_stream("items", n, seed)
    samples = []
    for start in range(0, draws, block := max(1, 2**18 // n)):
        count = min(block, draws - start)
        drawn = generator.integers(n, size=(count, n)) + n * np.arange(count)[:, None]
        samples.append(np.bincount(drawn.ravel(), minlength=count * n).reshape(count, n) @ table)
    return np.concatenate(samples)


@lru_cache(maxsize=2)
def sacrebleu_metric(kind: str) -> Any:
    """sacrebleu's BLEU or chrF with default settings; raises `InputError` if sacrebleu is not installed."""
    metrics = require_module("sacrebleu.metrics", f"the metric {kind}")
    return metrics.BLEU() if kind == "bleu" else metrics.CHRF()
