"""Estimates with 95% intervals, tests of differences, and scores per item that can be resampled.

Every reported number has its n and one of these intervals. `ItemScores` keeps a metric as summands per item, because
corpus metrics such as BLEU are not means of sentence scores: BLEU is computed from counts summed over sentences.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from posttrain.plugins import require_module
from posttrain.seeds import random_stream

Z = 1.959963984540054
"""97.5% quantile of the standard normal distribution."""


@dataclass(frozen=True)
class Estimate:
    """A rate or mean over `n` independent seeds or items with its 95% interval; limits are NaN if unknown."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Difference:
    """A difference with its 95% interval."""

    value: float
    low: float
    high: float


def success_rate(successes: int, n: int) -> Estimate:
    """Rate of `successes` in `n` independent trials with Wilson's score interval (Wilson 1927).

    center = (p + z^2 / 2n) / (1 + z^2 / n);  half = z sqrt(p (1 - p) / n + z^2 / 4n^2) / (1 + z^2 / n)
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"invalid rate: {successes} successes of {n} trials")
    return _wilson(successes / n, float(n), n)


def clustered_rate(seed_means: Sequence[float], episodes: int) -> Estimate:
    """Success rate over seeds with several, correlated episodes each.

    `seed_means`: mean success in [0, 1] of each of the k seeds. `episodes`: total number of episodes. The value is the
    mean of the seed means. The interval is Wilson's with the effective number of trials
    k p (1 - p) / var(seed means), clipped to [k, `episodes`] (Korn and Graubard 1998, with Wilson's limits). It equals
    `success_rate` for one episode per seed, and is wider than an interval over episodes if seeds differ in difficulty.
    """
    means = np.asarray(seed_means, dtype=np.float64)
    k = len(means)
    if k < 1 or episodes < k or means.min() < 0 or means.max() > 1:
        raise ValueError(
            f"invalid rate: {k} seed means of {episodes} episodes; means must lie in [0, 1], with an episode or more per seed"
        )
    p = float(means.mean())
    spread = float(means.var())
    if p in (0.0, 1.0):
        effective = float(k)
    elif spread == 0:
        effective = float(episodes)
    else:
        effective = min(max(k * p * (1 - p) / spread, k), episodes)
    return _wilson(p, effective, k)


def mean(values: Sequence[float]) -> Estimate:
    """Mean of `values` with Student's t interval, mean ± t(0.975, n - 1) s / sqrt(n), where s has divisor n - 1.

    The limits are NaN for a single value. For fewer than 30 heavily skewed values, use `bootstrap_mean`.
    """
    from scipy.special import stdtrit

    sample = np.asarray(values, dtype=np.float64)
    n = len(sample)
    if n < 1:
        raise ValueError("a mean needs at least one value")
    center = float(sample.mean())
    if n == 1:
        return Estimate(center, math.nan, math.nan, 1)
    half = float(stdtrit(n - 1, 0.975)) * float(sample.std(ddof=1)) / math.sqrt(n)
    return Estimate(center, center - half, center + half, n)


def bootstrap_mean(values: Sequence[float], seed: int = 0, draws: int = 10_000) -> Estimate:
    """Mean of `values` with a percentile bootstrap interval (Efron 1979), deterministic given `seed`."""
    sample = np.asarray(values, dtype=np.float64)
    if len(sample) < 1:
        raise ValueError("a mean needs at least one value")
    low, high = _bootstrap(sample, seed, draws)
    return Estimate(float(sample.mean()), low, high, len(sample))


def bootstrap_ratio(sums: Sequence[float], counts: Sequence[float], seed: int = 0, draws: int = 2_000) -> Estimate:
    """sum(sums) / sum(counts), such as nats per token, with a percentile bootstrap interval over rows."""
    above, below = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    n = len(above)
    if n < 1 or len(below) != n or below.sum() <= 0:
        raise ValueError(
            f"invalid ratio: {n} sums, {len(below)} counts; counts must have the same length and a positive sum"
        )
    if n == 1:
        return Estimate(float(above[0] / below[0]), math.nan, math.nan, 1)
    generator = random_stream("bootstrap ratio", seed)
    ratios = []
    for _ in range(draws):
        chosen = generator.integers(n, size=n)
        ratios.append(float(above[chosen].sum() / below[chosen].sum()))
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Estimate(float(above.sum() / below.sum()), float(low), float(high), n)


def paired_difference(a: Sequence[float], b: Sequence[float], seed: int = 0, draws: int = 10_000) -> Difference:
    """Mean of `a[i] - b[i]`, for two policies on the same seeds, with a percentile bootstrap interval."""
    if len(a) != len(b) or len(a) < 1:
        raise ValueError(f"paired values must have equal, positive lengths, got {len(a)} and {len(b)}")
    sample = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    low, high = _bootstrap(sample, seed, draws)
    return Difference(float(sample.mean()), low, high)


def interquartile_mean(runs: Sequence[Sequence[float]], seed: int = 0, draws: int = 2_000) -> Estimate:
    """Mean of the middle half of the results of training runs, with a stratified bootstrap interval.

    `runs[e]`: one result per training seed in environment e; all are pooled, and the lowest and highest quarters left
    out. Each draw resamples the runs within every environment (Agarwal et al. 2021, arXiv 2108.13264). Runs at the
    boundary count with a fractional weight, so fewer than four runs are allowed.
    """
    strata = [np.asarray(results, dtype=np.float64) for results in runs]
    if not strata or min(map(len, strata)) < 1:
        raise ValueError("an interquartile mean needs at least one run in every environment")
    generator = random_stream("interquartile mean", seed)
    samples = [
        np.concatenate([results[generator.integers(len(results), size=len(results))] for results in strata])
        for _ in range(draws)
    ]
    low, high = np.quantile([_middle_mean(sample) for sample in samples], [0.025, 0.975])
    pooled = np.concatenate(strata)
    return Estimate(_middle_mean(pooled), float(low), float(high), len(pooled))


def _middle_mean(values: np.ndarray) -> float:
    n = len(values)
    edges = np.clip(np.arange(n + 1), n / 4, 3 * n / 4)
    return float((np.sort(values) * np.diff(edges)).sum() / (n / 2))


def crossed_mean(table: np.ndarray, seed: int = 0, draws: int = 10_000) -> Estimate:
    """Mean of a table [training seeds, tasks] with a 95% interval over both; `n` is the number of training seeds.

    Each draw is the mean of resampled tasks, which all training seeds share, plus Student's t of S - 1 degrees of freedom
    times the standard error of the S seed means. The seeds are not resampled, because a bootstrap of five is too narrow:
    where the seeds differ most, a bootstrap over both (Owen 2007, "The pigeonhole bootstrap", Annals of Applied Statistics
    1) covered the truth in 87 to 90% of simulated tables, this interval in 95%. Noise within a seed counts in both parts,
    so it errs towards wide intervals. The limits are clipped to the range of the values.
    """
    values = np.asarray(table, dtype=np.float64)
    if values.ndim != 2 or 0 in values.shape:
        raise ValueError(f"the table must have a row per training seed and a column per task, got shape {values.shape}")
    seeds, tasks = values.shape
    generator = random_stream("crossed mean", seed)
    columns = generator.multinomial(tasks, np.full(tasks, 1 / tasks), size=draws)
    means = columns @ values.mean(0) / tasks
    if seeds > 1:
        error = values.mean(1).std(ddof=1) / math.sqrt(seeds)
        means = means + error * generator.standard_t(seeds - 1, size=draws)
    low, high = np.clip(np.quantile(means, [0.025, 0.975]), values.min(), values.max())
    return Estimate(float(values.mean()), float(low), float(high), seeds)


def probability_of_improvement(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], seed: int = 0, draws: int = 2_000
) -> Estimate:
    """Probability that a training run of `a` ends above one of `b`, the mean over environments; a tie counts half.

    `a[e]`, `b[e]`: results of the runs in environment e. The interval is a stratified bootstrap's over the runs of both
    sides (Agarwal et al. 2021, arXiv 2108.13264).
    """
    sides = [[np.asarray(results, dtype=np.float64) for results in side] for side in (a, b)]
    if not sides[0] or len(sides[0]) != len(sides[1]):
        raise ValueError(f"the sides must have the same environments, got {len(a)} and {len(b)}")
    wins = [
        (x[:, None] > y[None, :]) + 0.5 * (x[:, None] == y[None, :]) for x, y in zip(sides[0], sides[1], strict=True)
    ]
    generator = random_stream("probability of improvement", seed)
    means = []
    for _ in range(draws):
        chosen = [[generator.integers(size, size=size) for size in table.shape] for table in wins]
        means.append(np.mean([table[np.ix_(*rows)].mean() for table, rows in zip(wins, chosen, strict=True)]))
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(
        float(np.mean([table.mean() for table in wins])), float(low), float(high), sum(len(t) for t in sides[0])
    )


def _wilson(p: float, trials: float, n: int) -> Estimate:
    scale = 1 + Z**2 / trials
    center = (p + Z**2 / (2 * trials)) / scale
    half = Z * math.sqrt(p * (1 - p) / trials + Z**2 / (4 * trials**2)) / scale
    # At p = 0 and p = 1 a limit equals p; clip rounding errors.
    return Estimate(p, max(0.0, min(center - half, p)), min(1.0, max(center + half, p)), n)


def _bootstrap(sample: np.ndarray, seed: int, draws: int) -> tuple[float, float]:
    generator = random_stream("bootstrap", seed)
    means = [float(sample[generator.integers(len(sample), size=len(sample))].mean()) for _ in range(draws)]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


_MIN_DIFFERENCES = 10
"""Minimum number of differences for an interval of the standardized difference."""
_ROUNDING = 1e-9
"""A spread below this fraction of the values counts as zero."""


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


def ranking_accuracy(chosen: Sequence[float], rejected: Sequence[float], seed: int = 0, draws: int = 2_000) -> Estimate:
    """Probability that a chosen answer's reward exceeds a rejected one's (area under the ROC curve; Mann, Whitney
    1947).

    Computed over all pairs of a chosen and a rejected answer; ties count half. The interval is a percentile bootstrap
    over answers. If all pairs have the same result, or one side has a single answer, resampling shows no spread. The
    interval is then Wilson's, with the size of the smaller side as the number of trials, because at most that many
    pairs are independent.
    """
    better, worse = np.asarray(chosen, dtype=np.float64), np.asarray(rejected, dtype=np.float64)
    if not len(better) or not len(worse):
        raise ValueError("a ranking needs chosen and rejected answers")
    wins = (better[:, None] > worse[None]) + 0.5 * (better[:, None] == worse[None])
    value, n = float(wins.mean()), len(better) + len(worse)
    if min(wins.shape) == 1 or wins.min() == wins.max():
        return replace(clustered_rate([value] * min(wins.shape), min(wins.shape)), value=value, n=n)
    generator = random_stream("ranking", seed)
    drawn = []
    for _ in range(draws):
        rows, columns = (generator.integers(size, size=size) for size in wins.shape)
        # The mean over a resample is a weighted mean of the table, with the counts of the drawn answers as weights.
        over = np.bincount(rows, minlength=len(better)) / len(better)
        under = np.bincount(columns, minlength=len(worse)) / len(worse)
        drawn.append(float(over @ wins @ under))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(value, float(low), float(high), n)


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
    """Rate of `b` minus rate of `a` (values 0 or 1 on the same items) with Newcombe's paired score interval.

    Newcombe 1998 (Statistics in Medicine 17, 2635), method 10: combines the Wilson limits of both rates and subtracts a
    term for their correlation phi, whose numerator has a continuity correction.
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
    """Conditional odds ratio of paired rates, only_b / only_a, with its exact interval (Clopper and Pearson 1934).

    Infinite if `only_a` is 0, NaN without discordant items. `n` is the number of discordant items.
    """
    from scipy.special import betaincinv

    n = only_a + only_b
    if not n:
        return Estimate(math.nan, math.nan, math.nan, 0)
    low = float(betaincinv(only_b, only_a + 1, 0.025)) if only_b else 0.0
    high = float(betaincinv(only_b + 1, only_a, 0.975)) if only_a else 1.0
    value, *limits = (p / (1 - p) if p < 1 else math.inf for p in (only_b / n, low, high))
    return Estimate(value, limits[0], limits[1], n)


def standardized_difference(differences: Sequence[float], seed: int = 0, draws: int = 2_000) -> Estimate:
    """Cohen's d_z of paired differences, mean / standard deviation (divisor n - 1; Cohen 1988).

    The interval is a percentile bootstrap over items. The value is NaN for fewer than two differences, or if they are
    equal up to rounding. The limits are NaN for fewer than ten, whose resamples often have almost no spread.
    """
    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    deviation = float(values.std(ddof=1)) if n > 1 else 0.0
    if not deviation or np.ptp(values) <= _ROUNDING * np.abs(values).max():
        return Estimate(math.nan, math.nan, math.nan, n)
    value = float(values.mean())
    if n < _MIN_DIFFERENCES:
        return Estimate(value / deviation, math.nan, math.nan, n)
    generator = random_stream("standardised difference", seed)
    drawn = values[generator.integers(n, size=(draws, n))]
    spread = drawn.std(axis=1, ddof=1)
    varied = spread > _ROUNDING * np.abs(drawn).max(axis=1)
    low, high = np.quantile(drawn.mean(axis=1)[varied] / spread[varied], [0.025, 0.975])
    return Estimate(value / deviation, float(low), float(high), n)


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


Kind = Literal["rate", "mean", "perplexity", "bleu", "chrf", "least_squares", "correlation"]
"""Summands per item: (value, 1) for `rate` and `mean`, (nats, tokens) for `perplexity`, sacrebleu's counts for `bleu`
and `chrf`, the normal equations x x^T [k k] and x y [k] for `least_squares`, and (1, x, y, x^2, y^2, x y) for
`correlation`."""

DRAWS = 5_000
"""Bootstrap resamples."""
_UNLIMITED_TRIALS = 10**12
"""No upper bound on the effective number of trials, because the number of samples per item is unknown here."""


@dataclass(frozen=True)
class ItemScores:
    """The summands of one metric: item -> [S] float64."""

    kind: Kind
    items: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.items)

    def table(self, names: Sequence[str] | None = None) -> np.ndarray:
        """[n, S] float64: the summands of the items `names` (default: all items in their order)."""
        return np.stack([self.items[name] for name in (self.items if names is None else names)])

    def values(self, names: Sequence[str] | None = None) -> np.ndarray:
        """[n] float64: the metric of each item alone."""
        return combine(self.kind, self.table(names))


def item_means(kind: Literal["rate", "mean"], samples: Iterable[tuple[str, float]]) -> ItemScores:
    """Mean over the samples of each item, so that all items have the same weight."""
    of_items: dict[str, list[float]] = {}
    for item, value in samples:
        of_items.setdefault(item, []).append(float(value))
    return ItemScores(
        kind, {item: np.array([math.fsum(values) / len(values), 1.0]) for item, values in of_items.items()}
    )


def item_sums(kind: Kind, samples: Iterable[tuple[str, Sequence[float]]]) -> ItemScores:
    """Sum of the summands [S] over the samples of each item."""
    totals: dict[str, np.ndarray] = {}
    for item, summands in samples:
        totals[item] = totals.get(item, 0.0) + np.asarray(summands, dtype=np.float64)
    return ItemScores(kind, totals)


def combine(kind: Kind, sums: np.ndarray) -> np.ndarray:
    """The metric [...] from summands [..., S]: sum / count, exp(nats / tokens), BLEU or chrF in [0, 100], the first
    coefficient of a least-squares fit (of minimum norm if it is not unique), or Pearson's correlation (0 without
    variance).
    """
    if kind in ("rate", "mean", "perplexity"):
        ratio = sums[..., 0] / sums[..., 1]
        return np.exp(ratio) if kind == "perplexity" else ratio
    if kind == "least_squares":
        k = (math.isqrt(4 * sums.shape[-1] + 1) - 1) // 2
        normal = sums[..., : k * k].reshape(*sums.shape[:-1], k, k)
        return np.einsum("...i,...i->...", np.linalg.pinv(normal, hermitian=True)[..., 0, :], sums[..., k * k :])
    if kind == "correlation":
        n, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
        spread = np.sqrt(np.maximum((xx - x * x / n) * (yy - y * y / n), 0.0))
        return np.divide(xy - x * y / n, spread, out=np.zeros_like(spread), where=spread > 0)
    metric = sacrebleu_metric(kind)
    flat = sums.reshape(-1, sums.shape[-1])
    scores = [metric._compute_score_from_stats([round(count) for count in row]).score for row in flat]
    return np.array(scores).reshape(sums.shape[:-1])


def estimate(scores: ItemScores, seed: int = 0, draws: int = DRAWS) -> Estimate:
    """The metric over all items with a 95% interval over items.

    Means have Student's t interval, rates the interval of `clustered_rate`. Other metrics have a percentile bootstrap
    interval (Efron 1979) whose half-widths are multiplied by t(0.975, n - 1) / z sqrt(n / (n - 1)), because percentile
    intervals are too narrow by that factor (Hesterberg 2015); for a perplexity, on the logarithm. Except for a rate,
    the limits are NaN for a single item.
    """
    from scipy.special import stdtrit

    if not len(scores):
        raise ValueError("an estimate needs at least one item")
    table, n = scores.table(), len(scores)
    value = float(combine(scores.kind, table.sum(0)))
    if scores.kind == "rate":
        per_item = scores.values()
        known = clustered_rate(per_item.tolist(), n if np.ptp(per_item) == 0 else _UNLIMITED_TRIALS)
        return Estimate(value, known.low, known.high, n)
    if n == 1:
        return Estimate(value, math.nan, math.nan, 1)
    if scores.kind == "mean":
        return mean(scores.values().tolist())
    limits = np.quantile(combine(scores.kind, resampled_sums(table, seed, draws)), [0.025, 0.975])
    # With few items and a skewed metric, the percentiles may not contain the value.
    low, high = min(float(limits[0]), value), max(float(limits[1]), value)
    wider = float(stdtrit(n - 1, 0.975)) / Z * math.sqrt(n / (n - 1))
    if scores.kind == "perplexity":
        low, high = (value * float(np.exp(wider * math.log(limit / value))) for limit in (low, high))
        return Estimate(value, low, high, n)
    bounds = {"correlation": (-1.0, 1.0), "least_squares": (-math.inf, math.inf)}.get(scores.kind, (0.0, 100.0))
    low, high = (value + wider * (limit - value) for limit in (low, high))
    return Estimate(value, max(bounds[0], low), min(bounds[1], high), n)


def resampled_sums(table: np.ndarray, seed: int = 0, draws: int = DRAWS) -> np.ndarray:
    """[draws, S]: sums over the items of bootstrap samples of `table` [n, S].

    The drawn items depend only on n and `seed`, so tables of the same items get the same samples.
    """
    n = len(table)
    generator = random_stream("items", n, seed)
    samples = np.empty((draws, table.shape[1]))
    for draw in range(draws):
        samples[draw] = np.bincount(generator.integers(n, size=n), minlength=n) @ table
    return samples


@lru_cache(maxsize=2)
def sacrebleu_metric(kind: str) -> Any:
    """sacrebleu's BLEU or chrF with default settings; raises `InputError` if sacrebleu is not installed."""
    metrics = require_module("sacrebleu.metrics", f"the metric {kind}")
    return metrics.BLEU() if kind == "bleu" else metrics.CHRF()
