import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from posttrain.evaluation.statistics import (
    bootstrap_mean,
    calibration,
    clustered_rate,
    crossed_mean,
    interquartile_mean,
    mean,
    paired_difference,
    probability_of_improvement,
    success_rate,
)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_success_rate_is_wilsons_interval(trial: tuple[int, int]) -> None:
    successes, n = trial
    rate = success_rate(successes, n)
    known = stats.binomtest(successes, n).proportion_ci(method="wilson")
    assert (rate.value, rate.n) == (successes / n, n)
    assert rate.low == pytest.approx(known.low, abs=1e-12)
    assert rate.high == pytest.approx(known.high, abs=1e-12)
    assert 0 <= rate.low <= rate.value <= rate.high <= 1


def test_success_rate_against_published_values() -> None:
    # Newcombe (1998), Table I, score method without continuity correction.
    for successes, n, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        rate = success_rate(successes, n)
        assert (round(rate.low, 4), round(rate.high, 4)) == (low, high)


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (3, 2), (-1, 2)])
def test_impossible_rates_are_refused(successes: int, n: int) -> None:
    with pytest.raises(ValueError):
        success_rate(successes, n)


@given(st.lists(st.booleans(), min_size=1, max_size=300))
def test_one_episode_per_seed_is_the_plain_rate(won: list[bool]) -> None:
    clustered, plain = clustered_rate([float(w) for w in won], len(won)), success_rate(sum(won), len(won))
    assert clustered.n == plain.n
    assert clustered.value == pytest.approx(plain.value, abs=1e-12)
    assert clustered.low == pytest.approx(plain.low, abs=1e-9)
    assert clustered.high == pytest.approx(plain.high, abs=1e-9)


def test_episodes_of_one_seed_do_not_count_as_independent() -> None:
    alike = clustered_rate([0.0, 1.0] * 10, episodes=200)
    assert (alike.low, alike.high) == pytest.approx((success_rate(10, 20).low, success_rate(10, 20).high))
    independent = clustered_rate([0.5] * 20, episodes=200)
    assert (independent.low, independent.high) == pytest.approx(
        (success_rate(100, 200).low, success_rate(100, 200).high)
    )
    assert clustered_rate([1.0] * 20, episodes=200).low == pytest.approx(success_rate(20, 20).low)
    with pytest.raises(ValueError):
        clustered_rate([], 0)
    with pytest.raises(ValueError):
        clustered_rate([1.5], 1)


def test_clustered_rate_covers_the_truth() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        difficulty = generator.beta(2, 3, size=60)
        means = generator.binomial(4, difficulty) / 4
        rate = clustered_rate(means.tolist(), 240)
        hits += rate.low <= 0.4 <= rate.high
    assert 0.92 <= hits / 400 <= 0.98


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=50))
def test_mean_is_students_interval(values: list[float]) -> None:
    found = mean(values)
    if np.std(values) > 1e-9:
        low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
        assert (found.low, found.high) == pytest.approx((low, high), rel=1e-9, abs=1e-9)
    assert found.value == pytest.approx(np.mean(values))
    assert found.n == len(values)


def test_mean_of_one_value_has_an_unknown_interval() -> None:
    one = mean([2.0])
    assert (one.value, one.n) == (2.0, 1)
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    with pytest.raises(ValueError):
        mean([])


def test_bootstrap_agrees_with_scipy_and_with_itself() -> None:
    values = np.random.default_rng(1).exponential(size=80)
    found = bootstrap_mean(values.tolist())
    assert found == bootstrap_mean(values.tolist())
    known = stats.bootstrap((values,), np.mean, method="percentile", rng=np.random.default_rng(2)).confidence_interval
    assert (found.low, found.high) == pytest.approx((known.low, known.high), abs=0.02)


def test_pairing_removes_the_variance_between_seeds() -> None:
    generator = np.random.default_rng(3)
    difficulty = generator.normal(0, 10, size=100)
    a, b = difficulty + 1 + generator.normal(0, 0.1, 100), difficulty
    found = paired_difference(a.tolist(), b.tolist())
    assert found.value == pytest.approx(np.mean(a - b))
    assert 0.9 < found.low < 1 < found.high < 1.1
    with pytest.raises(ValueError):
        paired_difference([1.0], [1.0, 2.0])


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6))
def test_interquartile_mean_is_scipys_trimmed_mean_and_weighs_parts_of_runs(values):
    four = [[*values, *values, *values, *values]]  # a whole number of runs in each quarter
    assert interquartile_mean(four, draws=10).value == pytest.approx(stats.trim_mean(four[0], 0.25), abs=1e-12)
    # The same runs once: each counts in part, and the mean is the same.
    assert interquartile_mean([values], draws=10).value == pytest.approx(stats.trim_mean(four[0], 0.25), abs=1e-12)


def test_interquartile_mean_resamples_within_environments():
    """Where the runs of each environment agree, nothing is left to resample, however far the environments are apart."""
    found = interquartile_mean([[0.0] * 5, [1.0] * 5])
    assert (found.value, found.low, found.high, found.n) == (0.5, 0.5, 0.5, 10)
    spread = interquartile_mean([[0.1, 0.5, 0.6, 0.9, 0.95]])
    assert spread.low < spread.value < spread.high


def test_crossed_mean_is_over_training_seeds_and_tasks():
    """Where only one of the two differs, the interval is that of this one alone: a bootstrap of the tasks, Student's of the seeds."""
    draws = np.random.default_rng(0)
    tasks, seeds = (draws.random(50) < 0.7).astype(float), draws.random(8)
    over_tasks, over_seeds = crossed_mean(np.tile(tasks, (8, 1))), crossed_mean(np.tile(seeds[:, None], (1, 50)))
    for found, alone in ((over_tasks, bootstrap_mean(tasks.tolist())), (over_seeds, mean(seeds.tolist()))):
        assert (found.value, found.n) == (pytest.approx(alone.value), 8)
        assert found.low == pytest.approx(alone.low, abs=0.02)
        assert found.high == pytest.approx(alone.high, abs=0.02)
    both = crossed_mean(0.5 * tasks[None, :] + 0.5 * seeds[:, None])
    assert both.high - both.low > 0.5 * max(over_tasks.high - over_tasks.low, over_seeds.high - over_seeds.low)
    one = crossed_mean(tasks[None])
    assert one.low == pytest.approx(bootstrap_mean(tasks.tolist()).low, abs=0.02)
    with pytest.raises(ValueError, match="row per training seed"):
        crossed_mean(np.zeros(3))


@pytest.mark.parametrize(("level", "of_seeds", "of_tasks"), [(0.5, 0.4, 1.0), (2.2, 0.05, 1.5), (6.0, 0.7, 0.5)])
def test_crossed_mean_covers_the_truth_with_five_seeds(level, of_seeds, of_tasks):
    """Whether seeds or tasks differ more, and near 100%."""
    draws = np.random.default_rng(0)

    def success(seeds, tasks):
        return 1 / (1 + np.exp(-level - of_seeds * seeds - of_tasks * tasks))

    truth = success(*draws.standard_normal((2, 200_000))).mean()
    hits = 0
    for _ in range(100):
        chance = success(draws.standard_normal((5, 1)), draws.standard_normal((1, 200)))
        found = crossed_mean(draws.random((5, 200)) < chance, draws=1000)
        hits += found.low <= truth <= found.high
    assert hits >= 90


def test_probability_of_improvement_is_mann_whitneys_u():
    draws = np.random.default_rng(0)
    a, b = (
        [draws.normal(0.3, 1, 7).round(1).tolist() for _ in range(2)],
        [draws.normal(0, 1, 6).round(1) for _ in range(2)],
    )
    expected = np.mean([stats.mannwhitneyu(x, y).statistic / 42 for x, y in zip(a, b, strict=True)])
    found = probability_of_improvement(a, b)
    assert found.value == pytest.approx(expected)
    assert found.low <= found.value <= found.high
    assert probability_of_improvement([[1.0, 2.0]], [[0.0]]).low == 1.0
    with pytest.raises(ValueError, match="same environments"):
        probability_of_improvement([[1.0]], [[1.0], [2.0]])


def test_ties_are_half_right_in_a_calibration():
    bins, error = calibration([0.0] * 4)
    assert (bins[0].accuracy.value, error) == (0.5, 0.0)
