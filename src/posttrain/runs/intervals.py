"""95% intervals of rates and means. `python benchmarks/intervals.py` simulates how often they contain the truth."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

_SHARE = 0.05
"""Share of intervals that may miss the truth."""
_GRID = 33
"""Proportions among which a limit is searched, twice."""
_MANY = 2_000
"""With more degrees of freedom, Student's quantile is that of this number, which is larger by less than 0.1%."""
_FEWEST = 64
"""Values of unknown range that have an interval: of these, 96% have a value that a task has with a probability of 5%."""
FEWEST_SEEDS = 5
"""Training seeds that have an interval: if half of all runs fail, 94% of samples have failed and other runs."""
_DRAWS = 5_000
"""Random weights of a mean of known range."""
ROUNDING = 1e-9
"""Values whose range is below this fraction of their size are equal."""


@dataclass(frozen=True)
class Estimate:
    """A rate or mean over `n` independent seeds or items with its 95% interval; limits are NaN if unknown."""

    value: float
    low: float
    high: float
    n: int

    @property
    def limits(self) -> tuple[float, float, float]:
        """The value and its limits."""
        return self.value, self.low, self.high

    def scaled(self, low: float, high: float) -> "Estimate":
        """The mean of values `low` and `high`, where this is the rate of `high`."""
        value, least, most = (low + (high - low) * rate for rate in self.limits)
        return Estimate(value, least, most, self.n)


def success_rate(successes: int, n: int) -> Estimate:
    """Rate of `successes` in `n` independent trials with the exact interval of Blaker (2000, Canadian J. of Statistics 28).

    It contains the truth in at least 95% of samples, for every rate and n, and is inside the interval of Clopper and
    Pearson: the rates for which a result at least as unlikely as this one, on either side, has a probability above 5%.
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"invalid rate: {successes} successes of {n} trials")
    return Estimate(successes / n, _lowest(successes, n), 1 - _lowest(n - successes, n), n)


def clustered_rate(seed_means: Sequence[float], episodes: float = math.inf) -> Estimate:
    """Success rate over seeds with several, correlated episodes each.

    `seed_means`: mean success in [0, 1] of each of the k seeds. `episodes`: total number of episodes. The value p is the
    mean of the seed means. The interval is that of `success_rate` with the effective number of trials k / D, at most
    `episodes` (Korn and Graubard 1998). D = var(seed means) / (p (1 - p)) is 1 where the episodes of a seed are alike, and
    smaller the less they are. Few seeds, or rare successes, tell little about D, so it is averaged with 1: D with weight
    4 k p (1 - p), and 1 with weight 1. One episode per seed has the interval of `success_rate`.
    """
    k = len(seed_means)
    if k < 1 or episodes < k or min(seed_means) < 0 or max(seed_means) > 1:
        raise ValueError(
            f"invalid rate: {k} seed means of {episodes} episodes; means must lie in [0, 1], with an episode or more per seed"
        )
    p = math.fsum(seed_means) / k
    variance = math.fsum((mean - p) ** 2 for mean in seed_means) / k
    low, high = rate_limits(p, variance, k, episodes)
    return Estimate(p, low, high, k)


def rate_limits(p: float, variance: float, fewest: int, most: float) -> tuple[float, float]:
    """Limits of a rate whose estimate `p` has the variance `variance` / `fewest`; see `clustered_rate`.

    `fewest`, `most`: the number of independent trials at least and at most.
    """
    trials = min(fewest * (4 * fewest * p * (1 - p) + 1) / (4 * fewest * variance + 1), most)
    # Rounding errors would move a limit to the next proportion of the grid.
    trials, successes = round(trials, 6), round(p * trials, 6)
    return _lowest(successes, trials), 1 - _lowest(trials - successes, trials)


@lru_cache(maxsize=4096)
def _lowest(successes: float, trials: float) -> float:
    """Blaker's lower limit; numbers of trials and successes that are not whole are effective ones."""
    import numpy as np
    from scipy.special import bdtrik, betainc, betaincinv

    if successes <= ROUNDING:
        return 0.0
    # The limit lies between the one-sided limits of 2.5% and 5%; the second search refines the first.
    failures = max(trials - successes, 0.0)
    start, stop = (float(betaincinv(successes, failures + 1, share)) for share in (_SHARE / 2, _SHARE))
    for _ in range(2):
        rates = np.linspace(start, stop, _GRID)
        as_many = betainc(successes, failures + 1, rates)
        # The largest number of successes whose lower tail is no more likely than `as_many`, a whole number less.
        few = successes - np.ceil(successes - np.nan_to_num(bdtrik(as_many, trials, rates), nan=-1.0) - ROUNDING)
        tail = np.where(few > -1, 1 - betainc(np.maximum(few, -1 + ROUNDING) + 1, trials - few, rates), 0.0)
        unlikely = as_many + np.where(tail <= as_many * (1 + ROUNDING), tail, 0.0) <= _SHARE
        first = _GRID - 1 if unlikely.all() else max(int(np.argmin(unlikely)), 1)
        start, stop = float(rates[first - 1]), float(rates[first])
    return start


def mean(values: Sequence[float], bounds: tuple[float, float] | None = None) -> Estimate:
    """Mean of independent `values` with its 95% interval.

    `bounds`: the least and the greatest possible value. With them, the interval is that of Gaffke (2005; Learned-Miller and
    Thomas 2019, arXiv 1905.06208), which accounts for values that the sample lacks: the 2.5% quantile of the mean of the
    values and `bounds[0]` with random weights, exponential draws divided by their sum, and the 97.5% quantile with
    `bounds[1]`. Without them, it is that of `skewed_limits`, and the limits are NaN for fewer than 64 values and for values
    of which no three differ: these would not show a rare value.
    """
    n = len(values)
    center, deviation, skewness = _moments(values)
    if bounds is not None:
        if not all(within(value, bounds) for value in values):
            raise ValueError(f"values from {min(values):g} to {max(values):g} are not within the bounds {bounds}")
        low, high = _weighted_limits(values, bounds)
        # Rounding may move a limit beyond a bound, and the center of equal values beyond a limit.
        center = min(max(center, bounds[0]), bounds[1])
        return Estimate(center, max(min(low, center), bounds[0]), min(max(high, center), bounds[1]), n)
    if n < _FEWEST or len({round(value, 9) for value in values}) < 3 or not deviation:
        return Estimate(center, math.nan, math.nan, n)
    return Estimate(center, *skewed_limits(center, deviation, skewness, n, n - 1), n)


def seed_mean(values: Sequence[float], rate: bool = False, fewest: int = FEWEST_SEEDS) -> Estimate:
    """Mean over training seeds with its 95% interval: Student's t and, for success rates in [0, 1] (`rate`), `skewed_limits`
    with the skewness of the beta distribution that has their mean and variance.

    The limits are NaN for fewer than 5 seeds, among which all may have learned, or none, by chance, and for equal values. The
    interval does not account for failures so rare that no seed failed.
    """
    n = len(values)
    center, deviation, _ = _moments(values)
    if n < fewest or not deviation:
        return Estimate(center, math.nan, math.nan, n)
    skewness = beta_skewness(center, deviation**2 * (n - 1) / n) if rate else 0.0
    low, high = skewed_limits(center, deviation, skewness, n, n - 1)
    return Estimate(center, max(low, 0.0) if rate else low, min(high, 1.0) if rate else high, n)


def mean_difference(values: Sequence[float]) -> Estimate:
    """Mean of independent differences, about symmetric and of any size, with Student's t interval.

    mean ± t(0.975, n - 1) s / sqrt(n), where s has divisor n - 1. The limits are NaN for a single value, and for values that
    are equal.
    """
    return seed_mean(values, fewest=2)


def _moments(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, standard deviation (0 if the values are equal) and skewness (0 for fewer than 3 values)."""
    n = len(values)
    if n < 1:
        raise ValueError("a mean needs at least one value")
    center = math.fsum(values) / n
    least, most = min(values), max(values)
    if most - least <= ROUNDING * max(abs(least), abs(most)):
        return center, 0.0, 0.0
    # In units of the range, squares neither overflow nor vanish.
    parts = [(value - center) / (most - least) for value in values]
    deviation = math.sqrt(math.fsum(part**2 for part in parts) / (n - 1))
    skewness = math.fsum((part / deviation) ** 3 for part in parts) * n / ((n - 1) * (n - 2)) if n > 2 else 0.0
    return center, (most - least) * deviation, skewness


def within(value: float, bounds: tuple[float, float]) -> bool:
    """Whether a value is within its bounds, up to rounding to float32."""
    slack = 1e-6 * (bounds[1] - bounds[0])
    return bounds[0] - slack <= value <= bounds[1] + slack


def _weighted_limits(values: Sequence[float], bounds: tuple[float, float]) -> tuple[float, float]:
    import numpy as np

    from posttrain.seeds import random_stream

    draws = random_stream("mean", len(values))
    table = np.array([[*values, bound] for bound in bounds]).T
    means = []
    part = max(1_000_000 // len(table), 1)  # to bound the memory
    for done in range(0, _DRAWS, part):
        weights = draws.exponential(size=(min(part, _DRAWS - done), len(table)))
        means.append(weights @ table / weights.sum(1, keepdims=True))
    low, high = np.concatenate(means).T
    return float(np.quantile(low, 0.025)), float(np.quantile(high, 0.975))


def beta_skewness(mean: float, variance: float) -> float:
    """Skewness of the beta distribution with this mean in (0, 1) and a variance in (0, mean (1 - mean)]."""
    size = max(mean * (1 - mean) / variance - 1, 0.0)
    return 2 * (1 - 2 * mean) * math.sqrt(size + 1) / ((size + 2) * math.sqrt(mean * (1 - mean)))


def skewed_limits(center: float, deviation: float, skewness: float, n: int, freedom: int) -> tuple[float, float]:
    """The 95% limits of a mean `center` of n values: Student's t, joined with that of Johnson (1978, J. of the American
    Statistical Association 73), which is shifted by skewness s (1 + 2 t^2) / 6n, s = `deviation`, t = t(0.975, freedom).
    """
    freedom = min(freedom, _MANY)
    low, high = t_limits(center, deviation / math.sqrt(n), freedom)
    shift = skewness * deviation * (1 + 2 * t_975(freedom) ** 2) / (6 * n)
    return low + min(shift, 0.0), high + max(shift, 0.0)


def t_limits(center: float, error: float, freedom: float) -> tuple[float, float]:
    """Student's t interval: `center` ± t(0.975, `freedom`) `error`, the standard error. All t intervals are computed here."""
    half = t_975(freedom) * error
    return center - half, center + half


@cache
def t_975(freedom: float) -> float:
    """The 0.975 quantile of Student's t with `freedom` degrees of freedom.

    Bisects P(|T| < sqrt(freedom) tan a) = 0.95 in the angle a, a finite sum for whole degrees of freedom (Abramowitz and
    Stegun 26.7.3 and 26.7.4). Only fractions and large numbers are from scipy, which would double the memory of
    `posttrain view`.
    """
    if freedom != int(freedom) or freedom > _MANY:
        from scipy.special import stdtrit

        return float(stdtrit(freedom, 0.975))
    freedom = int(freedom)

    def inside(angle: float) -> float:
        sine, cosine, odd = math.sin(angle), math.cos(angle), freedom % 2
        total, term = 0.0, cosine if odd else 1.0
        for power in range(2 + odd, freedom + 1, 2):
            total += term
            term *= cosine * cosine * (power - 1) / power
        return 2 / math.pi * (angle + sine * total) if odd else sine * total

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if inside(middle) < 0.95 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)
