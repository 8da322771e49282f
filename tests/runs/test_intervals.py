"""Intervals of rates and means: exact coverage, closed forms, published values and limits of what is measured."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from posttrain.runs.intervals import (
    beta_skewness,
    clustered_rate,
    mean,
    mean_difference,
    seed_mean,
    skewed_limits,
    success_rate,
    t_975,
)


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
    for rate, words in (*((success_rate, one) for one in ((0, 0), (3, 2), (-1, 2))), (clustered_rate, ([1.5], 1))):
        with pytest.raises(ValueError, match="invalid rate"):
            rate(*words)


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


def test_limits_of_skewed_values_are_students_and_johnsons():
    for freedom in (*range(1, 40), 255, 1000):
        assert t_975(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-12), freedom
    low, high = stats.t.interval(0.95, 15, loc=2.0, scale=3 / 4)
    assert skewed_limits(2.0, 3.0, 0.0, 16, 15) == pytest.approx((low, high))
    shift = 1.5 * 3 * (1 + 2 * stats.t.ppf(0.975, 15) ** 2) / 96
    assert skewed_limits(2.0, 3.0, 1.5, 16, 15) == pytest.approx((low, high + shift))
    assert skewed_limits(2.0, 3.0, -1.5, 16, 15) == pytest.approx((low - shift, high))


@given(st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_the_skewness_is_that_of_the_beta_distribution(center, share):
    variance = share * center * (1 - center)
    size = center * (1 - center) / variance - 1
    assert beta_skewness(center, variance) == pytest.approx(
        stats.beta.stats(center * size, (1 - center) * size, moments="s"), rel=1e-6, abs=1e-6
    )


@pytest.mark.parametrize("values", [[2.0], [1.0] * 64, [0.1 + 0.2, 0.3], [0.0] * 5])
def test_equal_values_of_unknown_range_have_no_interval(values):
    for known in (mean(values), mean_difference(values), seed_mean(values), seed_mean(values, rate=True)):
        assert (known.value, known.n) == (pytest.approx(values[0]), len(values))
        assert math.isnan(known.low)
        assert math.isnan(known.high)
    with pytest.raises(ValueError, match="at least one"):
        mean([])


def test_equal_values_of_known_range_have_the_interval_of_a_rate():
    """The range makes the difference: 5 of 5 can be 55%, and 64 returns of 0 can be rare successes."""
    assert mean([1.0] * 5, (0, 1)).limits == pytest.approx((1, 0.025**0.2, 1), abs=0.02)
    assert mean([0.0] * 64, (0, 10)).limits == pytest.approx((0, 0, 10 * (1 - 0.025 ** (1 / 64))), abs=0.04)


@pytest.mark.parametrize(("successes", "n"), [(1, 8), (3, 16), (40, 64)])
def test_the_mean_of_known_range_is_clopper_and_pearsons_for_two_values(successes, n):
    exact = stats.binomtest(successes, n).proportion_ci(method="exact")
    known = mean([3.0] * successes + [-1.0] * (n - successes), (-1, 3))
    assert known.limits[1:] == pytest.approx((4 * exact.low - 1, 4 * exact.high - 1), abs=0.1)


@pytest.mark.parametrize("n", [3, 5, 16])
@pytest.mark.parametrize(
    ("values", "chances"),
    [((-0.1, 0, 1), (0.3, 0.6, 0.1)), ((0, 0.1, 1), (0.6, 0.3, 0.1)), ((-5, 0, 1), (0.05, 0.45, 0.5))],
)
def test_a_known_range_covers_a_value_that_the_sample_may_lack(values, chances, n):
    """Without the range, t covers 41% to 83% of samples of 5 to 16."""
    generator = np.random.default_rng(n)
    truth, hits = np.dot(values, chances), 0
    for _ in range(200):
        known = mean(generator.choice(values, n, p=chances).tolist(), (min(values), max(values)))
        assert min(values) <= known.low <= known.value <= known.high <= max(values)
        hits += known.low <= truth <= known.high
    assert hits >= 187


def test_few_values_or_few_levels_of_unknown_range_have_no_interval():
    generator = np.random.default_rng(0)
    assert math.isnan(mean(generator.normal(size=63).tolist()).low)
    assert mean(generator.normal(size=64).tolist()).low < 0
    assert math.isnan(mean([0.0, 1.0] * 200).low)
    with pytest.raises(ValueError, match="bounds"):
        mean([0.0, 1.5], (0, 1))


@pytest.mark.parametrize(
    "draw",
    [
        lambda g: g.exponential(size=64) - 1,
        lambda g: g.lognormal(0, 0.5, 64) - math.exp(0.125),
        lambda g: g.standard_t(3, 64),
        lambda g: g.normal(0, 0.1, 64) + (g.random(64) < 0.05) - 0.05,
    ],
)
def test_the_mean_of_many_skewed_values_covers(draw):
    """Student's t alone covers 91% to 96%."""
    generator = np.random.default_rng(0)
    hits = sum((known := mean(draw(generator).tolist())).low <= 0 <= known.high for _ in range(1000))
    assert hits >= 935


@pytest.mark.parametrize("n", [5, 8, 20])
@pytest.mark.parametrize(
    ("draw", "truth"),
    [
        (lambda g, n: g.normal(0.7, 0.05, n), 0.7),
        (lambda g, n: g.beta(8, 1, n), 8 / 9),
        (lambda g, n: g.beta(20, 1, n), 20 / 21),
        (lambda g, n: np.where(g.random(n) < 0.5, 0.05, 0.95) + g.uniform(-0.04, 0.04, n), 0.5),
    ],
)
def test_the_mean_over_seeds_covers(draw, truth, n):
    """Student's t covers 89% near 100%."""
    generator = np.random.default_rng(2)
    hits = sum((k := seed_mean(draw(generator, n).tolist(), rate=True)).low <= truth <= k.high for _ in range(1000))
    assert hits >= 930


def test_the_mean_over_seeds_is_students_where_that_is_right():
    seeds = [0.62, 0.71, 0.68, 0.75, 0.66]
    assert seed_mean(seeds) == mean_difference(seeds)
    t, rate = mean_difference(seeds), seed_mean(seeds, rate=True)
    assert rate.high - rate.low == pytest.approx(t.high - t.low, rel=0.08)
    assert math.isnan(seed_mean(seeds[:4]).low)
    near = seed_mean([0.99, 1.0, 0.98, 1.0, 1.0], rate=True)
    assert 0 <= near.low < 0.99 < near.high <= 1


def test_a_difference_is_not_taken_for_a_rate():
    """B is better once in five items: that it is never worse is not known."""
    assert mean([0, 0, 0, 0, 1.0], (0, 1)).low >= 0
    assert mean_difference([0, 0, 0, 0, 1.0]).low < 0
