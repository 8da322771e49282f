"""95% intervals of rates and means. `posttrain benchmark intervals` simulates how often they contain the truth."""

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
FEW = 8
"""With fewer values, skewness is not estimated, and two different values do not show that there are no others."""
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


def two_values(values: Sequence[float]) -> tuple[float, float] | None:
    """The two values that a measurement has, up to rounding, such as rewards of 0 and 1; None if it has others or few are known."""
    levels = {round(value, 9) for value in values}
    return (min(levels), max(levels)) if levels == {0, 1} or (len(levels) == 2 and len(values) >= FEW) else None


def mean(values: Sequence[float], rate: bool = False) -> Estimate:
    """Mean of independent `values` of unknown range with its 95% interval.

    Values that are one of two have the interval of `success_rate`. Others have that of `mean_difference`, from 8 values on
    with Hall's transformation of t for skewed values (Hall 1992, J. of the Royal Statistical Society B 54). The limits do
    not pass a minimum of 0, a maximum of 1, and an extreme that at least half of 8 or more values have; with `rate`, they
    are in [0, 1]. No interval can know of values that are so rare that the sample has none.
    """
    if two := two_values(values):
        return success_rate(sum(2 * value > sum(two) for value in values), len(values)).scaled(*two)
    center, low, high = _student(values, len(values) >= FEW).limits
    least, most = min(values), max(values)
    if rate or least == 0 or _is_frequent(least, values):
        low = max(low, 0.0 if rate else least)
    if rate or most == 1 or _is_frequent(most, values):
        high = min(high, 1.0 if rate else most)
    return Estimate(center, low, high, len(values))


def mean_difference(values: Sequence[float]) -> Estimate:
    """Mean of independent differences, about symmetric and of any size, with Student's t interval.

    mean ± t(0.975, n - 1) s / sqrt(n), where s has divisor n - 1. The limits are NaN for a single value, and for values that
    are equal.
    """
    return _student(values, skewed=False)


def _student(values: Sequence[float], skewed: bool) -> Estimate:
    n = len(values)
    if n < 1:
        raise ValueError("a mean needs at least one value")
    center = math.fsum(values) / n
    least, most = min(values), max(values)
    if most - least <= ROUNDING * max(abs(least), abs(most)):
        return Estimate(center, math.nan, math.nan, n)
    # In units of the range, squares neither overflow nor vanish.
    parts = [(value - center) / (most - least) for value in values]
    deviation = math.sqrt(math.fsum(part**2 for part in parts) / (n - 1))
    quantile = t_975(min(n - 1, _MANY)) / math.sqrt(n)
    skewness = math.fsum((part / deviation) ** 3 for part in parts) * n / ((n - 1) * (n - 2)) if skewed else 0.0
    low, high = (center - (most - least) * deviation * _unskewed(limit, skewness, n) for limit in (quantile, -quantile))
    return Estimate(center, low, high, n)


def _is_frequent(extreme: float, values: Sequence[float]) -> bool:
    return len(values) >= FEW and 2 * sum(value == extreme for value in values) >= len(values)


def _unskewed(quantile: float, skewness: float, n: int) -> float:
    """The w with w + g w^2 / 3 + g^2 w^3 / 27 + g / 6n = `quantile`, where g is the skewness."""
    if abs(skewness) < 1e-6:
        return quantile
    cube = 1 + skewness * (quantile - skewness / (6 * n))
    return 3 / skewness * (math.copysign(abs(cube) ** (1 / 3), cube) - 1)


@cache
def t_975(freedom: int) -> float:
    """The 0.975 quantile of Student's t with `freedom` >= 1 degrees of freedom.

    Bisects P(|T| < sqrt(freedom) tan a) = 0.95 in the angle a, a finite sum for whole degrees of freedom (Abramowitz and
    Stegun 26.7.3 and 26.7.4). Not from scipy, which would double the memory of `posttrain view`.
    """

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
