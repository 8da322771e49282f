"""95% intervals of rates, means and their differences. Every reported number comes with its n and one of these."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from posttrain.seeds import random_stream

Z = 1.959963984540054
"""97.5% quantile of the standard normal distribution."""


@dataclass(frozen=True)
class Estimate:
    """A rate or mean over `n` independent seeds with the limits of its 95% interval; NaN where unknown."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Difference:
    """`a - b` with the limits of its 95% interval."""

    value: float
    low: float
    high: float


def success_rate(successes: int, n: int) -> Estimate:
    """Rate of `successes` in `n` independent trials with Wilson's score interval (Wilson 1927).

    centre = (p + z^2 / 2n) / (1 + z^2 / n);  half = z sqrt(p (1 - p) / n + z^2 / 4n^2) / (1 + z^2 / n)
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"{successes} successes of {n} trials make no rate")
    return _wilson(successes / n, float(n), n)


def clustered_rate(seed_means: Sequence[float], episodes: int) -> Estimate:
    """Success rate where each seed was played several times; episodes of one seed are alike, so seeds are what counts.

    `seed_means`: mean success in [0, 1] of each of the k seeds; `episodes`: episodes in all. The value is the mean of
    the seed means. The interval is Wilson's with the effective number of trials k p (1 - p) / var(seed means), at
    most `episodes` and at least k (Korn and Graubard 1998, with Wilson's limits): it is `success_rate` exactly when
    every seed was played once, and is wider than counting episodes whenever seeds differ in difficulty.
    """
    means = np.asarray(seed_means, dtype=np.float64)
    k = len(means)
    if k < 1 or episodes < k or means.min() < 0 or means.max() > 1:
        raise ValueError(
            f"{k} seed means of {episodes} episodes make no rate; means lie in [0, 1], one or more per seed"
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
    """Mean of `values` with Student's t interval; with one value the limits are NaN, for its spread is unknown.

    mean +- t(0.975, n - 1) s / sqrt(n), s with divisor n - 1. Not meant for n < 30 of heavily skewed values: there
    use `bootstrap_mean`.
    """
    from scipy.special import stdtrit

    sample = np.asarray(values, dtype=np.float64)
    n = len(sample)
    if n < 1:
        raise ValueError("no values make no mean")
    centre = float(sample.mean())
    if n == 1:
        return Estimate(centre, math.nan, math.nan, 1)
    half = float(stdtrit(n - 1, 0.975)) * float(sample.std(ddof=1)) / math.sqrt(n)
    return Estimate(centre, centre - half, centre + half, n)


def bootstrap_mean(values: Sequence[float], seed: int = 0, draws: int = 10_000) -> Estimate:
    """Mean of `values` with a percentile bootstrap interval (Efron 1979), the same for the same `seed`."""
    sample = np.asarray(values, dtype=np.float64)
    if len(sample) < 1:
        raise ValueError("no values make no mean")
    low, high = _bootstrap(sample, seed, draws)
    return Estimate(float(sample.mean()), low, high, len(sample))


def bootstrap_ratio(sums: Sequence[float], counts: Sequence[float], seed: int = 0, draws: int = 2_000) -> Estimate:
    """sum(sums) / sum(counts) over rows, such as nats per token, with a percentile bootstrap interval over rows."""
    above, below = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    n = len(above)
    if n < 1 or len(below) != n or below.sum() <= 0:
        raise ValueError(f"{n} sums and {len(below)} counts make no ratio")
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
    """Mean of `a[i] - b[i]`, two players on the same seeds in the same order, with a percentile bootstrap interval."""
    if len(a) != len(b) or len(a) < 1:
        raise ValueError(f"pairs need as many values of one as of the other, got {len(a)} and {len(b)}")
    sample = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    low, high = _bootstrap(sample, seed, draws)
    return Difference(float(sample.mean()), low, high)


def _wilson(p: float, trials: float, n: int) -> Estimate:
    scale = 1 + Z**2 / trials
    centre = (p + Z**2 / (2 * trials)) / scale
    half = Z * math.sqrt(p * (1 - p) / trials + Z**2 / (4 * trials**2)) / scale
    # At p = 0 and p = 1 the limit is p itself; rounding may miss it.
    return Estimate(p, max(0.0, min(centre - half, p)), min(1.0, max(centre + half, p)), n)


def _bootstrap(sample: np.ndarray, seed: int, draws: int) -> tuple[float, float]:
    generator = random_stream("bootstrap", seed)
    means = [float(sample[generator.integers(len(sample), size=len(sample))].mean()) for _ in range(draws)]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


_FEWEST = 10
"""Differences that a standardised one needs for an interval."""
_ROUNDING = 1e-9
"""A spread below this share of the values is none."""


@dataclass(frozen=True)
class CalibrationBin:
    """Pairs whose predicted probability of the ranking lies in one stretch of [0.5, 1]."""

    low: float
    high: float
    confidence: float
    """Mean predicted probability that the answer with the larger reward is the better one."""
    accuracy: Estimate
    """Share of pairs in which it is."""


def pair_accuracy(margins: Sequence[float]) -> Estimate:
    """Share of pairs whose margin (reward of the better answer minus that of the worse) is above 0; a tie is half."""
    values = np.asarray(margins, dtype=np.float64)
    return clustered_rate(list((np.sign(values) + 1) / 2), len(values))


def ranking_accuracy(good: Sequence[float], bad: Sequence[float], seed: int = 0, draws: int = 2_000) -> Estimate:
    """Chance that a good answer's reward is above a bad one's (area under the ROC curve; Mann and Whitney 1947).

    Over all pairs of a good and a bad answer, a tie counting half; percentile bootstrap interval over answers. Where
    resampling shows no spread, because all pairs come out alike, or cannot, because one side is a single answer, the
    interval is Wilson's with as many trials as the smaller side has answers: no more of the pairs are independent.
    """
    better, worse = np.asarray(good, dtype=np.float64), np.asarray(bad, dtype=np.float64)
    if not len(better) or not len(worse):
        raise ValueError("a ranking needs good and bad answers")
    wins = (better[:, None] > worse[None]) + 0.5 * (better[:, None] == worse[None])
    value, n = float(wins.mean()), len(better) + len(worse)
    if min(wins.shape) == 1 or wins.min() == wins.max():
        return replace(clustered_rate([value] * min(wins.shape), min(wins.shape)), value=value, n=n)
    generator = random_stream("ranking", seed)
    drawn = []
    for _ in range(draws):
        rows, columns = (generator.integers(size, size=size) for size in wins.shape)
        # The mean over a resample is a weighted mean of the table: weights are how often each answer was drawn.
        over = np.bincount(rows, minlength=len(better)) / len(better)
        under = np.bincount(columns, minlength=len(worse)) / len(worse)
        drawn.append(float(over @ wins @ under))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(value, float(low), float(high), n)


def calibration(margins: Sequence[float], bins: int = 5) -> tuple[list[CalibrationBin], float]:
    """Bins of equal width over the predicted probability, and the expected calibration error (Guo et al. 2017).

    A Bradley-Terry model predicts that the answer with the larger reward is better with probability sigmoid(|margin|).
    The error is the mean over pairs of |confidence - accuracy| of their bin; empty bins are left out.
    """
    values = np.asarray(margins, dtype=np.float64)
    confidence = 1 / (1 + np.exp(-np.abs(values)))
    place = np.minimum(((confidence - 0.5) * 2 * bins).astype(int), bins - 1)
    found, error = [], 0.0
    for number in range(bins):
        inside = place == number
        n = int(inside.sum())
        if not n:
            continue
        right = success_rate(int((values[inside] > 0).sum()), n)
        mean = float(confidence[inside].mean())
        found.append(CalibrationBin(0.5 + number / 2 / bins, 0.5 + (number + 1) / 2 / bins, mean, right))
        error += n / len(values) * abs(mean - right.value)
    return found, error if len(values) else math.nan


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided exact p of McNemar's test (McNemar 1947): items that only A, and that only B, got right.

    Under no difference each of the n = only_a + only_b discordant items is either's with probability 1/2, so
    p = min(1, 2 P(X <= min(only_a, only_b))), X ~ Binomial(n, 1/2); without discordant items p = 1.
    """
    from scipy.special import bdtr

    n = only_a + only_b
    return min(1.0, 2 * float(bdtr(min(only_a, only_b), n, 0.5))) if n else 1.0


def paired_rates(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Rate of `b` minus rate of `a`, each 0 or 1 on the same items, by Newcombe's paired score method.

    Newcombe 1998 (Statistics in Medicine 17, 2635), method 10: the Wilson limits of both rates put together as for
    independent samples, less what their correlation phi takes away; phi's numerator is corrected for continuity.
    """
    first, second = np.asarray(a, dtype=bool), np.asarray(b, dtype=bool)
    n = len(first)
    if n < 1 or len(second) != n:
        raise ValueError(f"pairs need as many values of one as of the other, got {n} and {len(second)}")
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
    """Odds that a discordant item is B's, only_b / only_a, with its exact conditional interval (Clopper and Pearson).

    Infinite without items of A alone; NaN without any discordant item. `n` is the number of discordant items.
    """
    from scipy.special import betaincinv

    n = only_a + only_b
    if not n:
        return Estimate(math.nan, math.nan, math.nan, 0)
    low = float(betaincinv(only_b, only_a + 1, 0.025)) if only_b else 0.0
    high = float(betaincinv(only_b + 1, only_a, 0.975)) if only_a else 1.0
    value, *limits = (p / (1 - p) if p < 1 else math.inf for p in (only_b / n, low, high))
    return Estimate(value, limits[0], limits[1], n)


def standardised_difference(differences: Sequence[float], seed: int = 0, draws: int = 2_000) -> Estimate:
    """Cohen's d_z of paired differences, mean / standard deviation (divisor n - 1; Cohen 1988), with a percentile
    bootstrap interval over items. NaN where the differences are all alike but for rounding, or fewer than two. The
    limits are NaN with fewer than ten, for resamples of so few are often of nearly the same value.
    """
    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    deviation = float(values.std(ddof=1)) if n > 1 else 0.0
    if not deviation or np.ptp(values) <= _ROUNDING * np.abs(values).max():
        return Estimate(math.nan, math.nan, math.nan, n)
    value = float(values.mean())
    if n < _FEWEST:
        return Estimate(value / deviation, math.nan, math.nan, n)
    generator = random_stream("standardised difference", seed)
    drawn = values[generator.integers(n, size=(draws, n))]
    spread = drawn.std(axis=1, ddof=1)
    varied = spread > _ROUNDING * np.abs(drawn).max(axis=1)
    low, high = np.quantile(drawn.mean(axis=1)[varied] / spread[varied], [0.025, 0.975])
    return Estimate(value / deviation, float(low), float(high), n)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's corrected p-values of a family of tests (Holm 1979), in the order given.

    Sorted upwards, the i-th of m (from 1) is multiplied by m - i + 1; none is below one before it or above 1.
    """
    m = len(p_values)
    found, least = [0.0] * m, 0.0
    for rank, place in enumerate(sorted(range(m), key=lambda i: p_values[i])):
        least = max(least, min(1.0, (m - rank) * p_values[place]))
        found[place] = least
    return found
