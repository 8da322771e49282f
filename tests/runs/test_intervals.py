"""Intervals of rates and means: exact coverage, closed forms, published values and limits of what is measured."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from posttrain.runs.intervals import FEW, clustered_rate, mean, mean_difference, success_rate, t_975


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 13, 20, 40, 100])
def test_the_interval_of_a_rate_covers_every_rate_and_is_inside_clopper_and_pearsons(n):
    known = [success_rate(x, n) for x in range(n + 1)]
    low, high = (np.array([getattr(one, side) for one in known]) for side in ("low", "high"))
    exact = [stats.binomtest(x, n).proportion_ci(method="exact") for x in range(n + 1)]
    assert (low >= [one.low - 1e-12 for one in exact]).all()
    assert (high <= [one.high + 1e-12 for one in exact]).all()
    assert (np.diff(low) > 0).all()
    assert low + high[::-1] == pytest.approx(np.ones(n + 1))
    truth = np.linspace(0.0005, 0.9995, 1999)
    chance = stats.binom.pmf(np.arange(n + 1)[:, None], n, truth)
    covered = (chance * ((low[:, None] <= truth) & (truth <= high[:, None]))).sum(0)
    assert covered.min() >= 0.9499
    if n == 100:
        assert covered.mean() <= 0.96


def test_the_interval_of_a_rate_is_blakers():
    # Blaker (2000, corrected 2001): 0 of 10, 4 of 10 and 5 of 10, to the digits that a grid of rates has.
    for successes, low, high in ((0, 0.0, 0.2829), (4, 0.1500, 0.7171), (5, 0.2224, 0.7776)):
        rate = success_rate(successes, 10)
        assert (rate.low, rate.high) == pytest.approx((low, high), abs=2e-3)


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (3, 2), (-1, 2)])
def test_impossible_rates_are_refused(successes, n):
    with pytest.raises(ValueError, match="invalid rate"):
        success_rate(successes, n)


@given(st.lists(st.booleans(), min_size=1, max_size=300))
def test_one_episode_per_seed_is_the_plain_rate(won):
    clustered, plain = clustered_rate([float(w) for w in won], len(won)), success_rate(sum(won), len(won))
    assert clustered.n == plain.n
    assert clustered.limits == pytest.approx(plain.limits, abs=1e-6)


def test_episodes_of_one_seed_do_not_count_as_independent():
    alike = clustered_rate([0.0, 1.0] * 10, episodes=200)
    assert alike.limits == pytest.approx(success_rate(10, 20).limits)
    independent = clustered_rate([0.5] * 20, episodes=200)
    assert independent.limits == pytest.approx(success_rate(100, 200).limits)
    assert clustered_rate([1.0] * 20, episodes=200) == success_rate(20, 20)
    # Without the number of episodes: 20 (20 + 1) trials.
    assert clustered_rate([0.5] * 20).limits == pytest.approx(success_rate(210, 420).limits)
    with pytest.raises(ValueError, match="invalid rate"):
        clustered_rate([], 0)
    with pytest.raises(ValueError, match="invalid rate"):
        clustered_rate([1.5], 1)


@pytest.mark.parametrize(("seeds", "attempts"), [(8, 4), (16, 2), (60, 4)])
def test_the_interval_of_a_clustered_rate_covers(seeds, attempts):
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        means = generator.binomial(attempts, generator.beta(0.8, 1.2, size=seeds)) / attempts
        rate = clustered_rate(means.tolist(), seeds * attempts)
        hits += rate.low <= 0.4 <= rate.high
    assert hits >= 279


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=50))
def test_a_mean_difference_has_students_interval(values):
    known = mean_difference(values)
    assert known.value == pytest.approx(np.mean(values))
    assert known.n == len(values)
    if np.ptp(values) > 1e-6:
        low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
        assert (known.low, known.high) == pytest.approx((low, high), rel=1e-9, abs=1e-9)


def test_the_quantile_is_students():
    for freedom in (*range(1, 40), 255, 1000):
        assert t_975(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-12), freedom


@given(st.lists(st.floats(-1e3, 1e3), min_size=FEW, max_size=50))
def test_the_mean_of_many_values_has_halls_interval(values):
    """Hall's transformation of the standardized limits gives Student's quantiles back."""
    n, center, deviation = len(values), np.mean(values), np.std(values, ddof=1)
    known = mean(values)
    if np.ptp(values) <= 1e-3 or len({round(value, 6) for value in values}) < 3:  # two values, but for rounding
        assert not known.low > known.value
        return
    g = stats.skew(values, bias=False)
    for limit, quantile in ((known.low, stats.t.ppf(0.975, n - 1)), (known.high, stats.t.ppf(0.025, n - 1))):
        if limit in (0, 1) or values.count(limit) * 2 >= n:
            continue  # a bound
        w = (center - limit) / deviation
        assert w + g * w**2 / 3 + g**2 * w**3 / 27 + g / (6 * n) == pytest.approx(quantile / n**0.5, abs=1e-6)
    assert known.low < known.value < known.high


@pytest.mark.parametrize("values", [[2.0], [1.0] * 64, [0.1 + 0.2, 0.3], [0.0] * 5])
def test_equal_values_have_no_interval(values):
    for known in (mean(values), mean_difference(values), mean(values, rate=True)):
        assert (known.value, known.n) == (values[0], len(values))
        assert math.isnan(known.low)
        assert math.isnan(known.high)
    with pytest.raises(ValueError, match="at least one"):
        mean([])


@pytest.mark.parametrize(("p", "n"), [(0.01, 64), (0.02, 64), (0.05, 64), (0.02, 8), (0.05, 8), (0.01, 256)])
def test_the_mean_of_rare_rewards_covers(p, n):
    """Student's t covers 48% (p = 0.01, n = 64) to 73% (p = 0.02)."""
    missed = sum(
        stats.binom.pmf(x, n, p)
        for x in range(1, n)
        if not (known := mean([1.0] * x + [0.0] * (n - x))).low <= p <= known.high
    )
    assert missed <= 0.05
    assert mean([10.0] + [0.0] * 63).limits == pytest.approx([10 * limit for limit in success_rate(1, 64).limits])


def test_the_mean_of_skewed_values_covers():
    """Student's t covers 91%."""
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        known = mean(generator.exponential(size=16).tolist())
        hits += known.low <= 1 <= known.high
    assert 935 <= hits <= 965


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=40))
def test_the_limits_of_scores_stay_between_attained_bounds(values):
    known = mean(values)
    if math.isnan(known.low):
        return
    assert known.low <= known.value <= known.high
    if 0 in values:
        assert known.low >= 0
    if 1 in values:
        assert known.high <= 1
    bounded = mean(values, rate=True)
    assert 0 <= bounded.low <= bounded.high <= 1


def test_a_difference_is_not_taken_for_a_rate():
    """B is better once in five items: that it is never worse is not known."""
    assert mean([0, 0, 0, 0, 1.0]).low > 0
    assert mean_difference([0, 0, 0, 0, 1.0]).low < 0


def test_few_values_have_students_interval_within_the_range_of_a_rate():
    few = [0.2, 0.35, 0.5]
    assert mean(few) == mean_difference(few)
    assert mean([0.5, 0.9], rate=True).limits == (0.7, 0.0, 1.0)
    assert mean([0.9, 1.0, 0.95]).high == 1.0
