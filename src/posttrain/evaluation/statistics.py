"""95% intervals of rates, means and their differences. Every reported number comes with its n and one of these."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
