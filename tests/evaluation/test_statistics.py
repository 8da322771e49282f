import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from posttrain.evaluation.statistics import (
    ItemScores,
    calibration,
    crossed_mean,
    estimate,
    interquartile_mean,
    item_sums,
    probability_above,
    ratio,
)
from posttrain.runs.intervals import mean, mean_difference, success_rate


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6))
def test_interquartile_mean_is_scipys_trimmed_mean_and_weighs_parts_of_runs(values):
    four = [[*values, *values, *values, *values]]  # a whole number of runs in each quarter
    assert interquartile_mean(four, draws=10).value == pytest.approx(stats.trim_mean(four[0], 0.25), abs=1e-12)
    # The same runs once: each counts in part, and the mean is the same.
    assert interquartile_mean([values], draws=10).value == pytest.approx(stats.trim_mean(four[0], 0.25), abs=1e-12)


def test_interquartile_mean_resamples_within_environments():
    """Where the runs of each environment agree, nothing is left to resample, however far the environments are apart."""
    equal = interquartile_mean([[0.0] * 5, [1.0] * 5])
    assert (equal.value, equal.n) == (0.5, 10)
    assert math.isnan(equal.low)
    spread = interquartile_mean([[0.1, 0.5, 0.6, 0.9, 0.95]])
    assert 0 <= spread.low < spread.value < spread.high <= 1
    assert math.isnan(interquartile_mean([[0.5], [0.7]]).low)


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_the_interval_of_an_interquartile_mean_covers(seeds):
    """A percentile bootstrap covers 77% to 93%."""
    draws = np.random.default_rng(1)
    hits = 0
    for _ in range(300):
        known = interquartile_mean([draws.normal(0.5, 0.08, size=seeds)], draws=500)
        hits += known.low <= 0.5 <= known.high
    assert hits >= 279


@pytest.mark.parametrize(("rows", "least"), [(3, 0.935), (10, 0.935), (30, 0.935)])
def test_the_interval_of_a_ratio_covers(rows, least):
    """Nats per token of rows of unequal lengths; a percentile bootstrap covers 88% to 92%."""
    draws = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        tokens = draws.integers(5, 200, size=rows)
        known = ratio(draws.gamma(2, 0.5, size=rows) * tokens + 20, tokens)
        hits += known.low <= 1 + 20 / 102 <= known.high
    assert hits >= 1000 * least - 5


def test_the_ratio_of_equal_rows_is_a_mean_and_stays_positive():
    sums = [3.0, 4.0, 2.5, 3.5]
    known, plain = ratio(sums, [2] * 4), mean([one / 2 for one in sums])
    assert known.value == pytest.approx(plain.value)
    # To the first order of the logarithm.
    assert known.low == pytest.approx(plain.low, rel=0.1)
    assert ratio([0.01, 5, 0.01], [3, 40, 2]).low > 0
    for rows in (([3.0], [2]), ([2.0, 4.0], [1, 2]), ([2.0, 0.0], [1, 0])):
        assert math.isnan(ratio(*rows).low)
    with pytest.raises(ValueError, match="same length"):
        ratio([1.0], [1, 2])


@pytest.mark.parametrize("n", [8, 30])
def test_the_interval_of_a_correlation_covers(n):
    draws = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        x = draws.normal(size=n)
        y = 0.6 * x + 0.8 * draws.normal(size=n)
        sums = np.stack([np.ones(n), x, y, x * x, y * y, x * y], axis=1)
        known = estimate(ItemScores("correlation", {str(i): row for i, row in enumerate(sums)}))
        assert -1 <= known.low <= known.value <= known.high <= 1
        hits += known.low <= 0.6 <= known.high
    assert hits >= 276


def test_a_perplexity_has_the_interval_of_its_nats():
    known = estimate(item_sums("perplexity", ((str(i), (3.0 + i, 2.0)) for i in range(5))))
    nats = ratio([3.0, 4.0, 5.0, 6.0, 7.0], [2.0] * 5)
    assert known.limits == pytest.approx(np.exp(nats.limits))
    assert (known.n, known.low > 1) == (5, True)


def test_crossed_mean_is_over_training_seeds_and_tasks():
    """Where only one of the two differs, the interval is that of this one alone: a bootstrap of the tasks, Student's of the seeds."""
    draws = np.random.default_rng(0)
    tasks, seeds = (draws.random(50) < 0.7).astype(float), draws.random(8)
    over_tasks, over_seeds = crossed_mean(np.tile(tasks, (8, 1))), crossed_mean(np.tile(seeds[:, None], (1, 50)))
    for found, alone in ((over_tasks, mean(tasks.tolist())), (over_seeds, mean_difference(seeds.tolist()))):
        assert (found.value, found.n) == (pytest.approx(alone.value), 8)
        assert found.low == pytest.approx(alone.low, abs=0.02)
        assert found.high == pytest.approx(alone.high, abs=0.02)
    both = crossed_mean(0.5 * tasks[None, :] + 0.5 * seeds[:, None])
    assert both.high - both.low > 0.5 * max(over_tasks.high - over_tasks.low, over_seeds.high - over_seeds.low)
    one = crossed_mean(tasks[None])
    assert one.low == pytest.approx(mean(tasks.tolist()).low, abs=0.02)
    assert crossed_mean(np.ones((5, 400))).limits == success_rate(400, 400).limits
    assert math.isnan(crossed_mean(np.full((5, 4), 0.3)).low)
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


def test_the_probability_of_improvement_is_mann_whitneys_u():
    draws = np.random.default_rng(0)
    a, b = (
        [draws.normal(0.3, 1, 7).round(1).tolist() for _ in range(2)],
        [draws.normal(0, 1, 6).round(1) for _ in range(2)],
    )
    expected = np.mean([stats.mannwhitneyu(x, y).statistic / 42 for x, y in zip(a, b, strict=True)])
    known = probability_above(a, b)
    assert (known.value, known.n) == (pytest.approx(expected), 26)
    assert known.low <= known.value <= known.high
    with pytest.raises(ValueError, match="same environments"):
        probability_above([[1.0]], [[1.0], [2.0]])


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_the_interval_of_a_probability_of_improvement_covers(seeds):
    """A bootstrap covers 86% to 93%."""
    draws = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        known = probability_above([draws.normal(1, 1, seeds)], [draws.normal(0, 1, seeds)])
        hits += known.low <= 0.7602 <= known.high  # P(N(1, 2) > 0)
    assert hits >= 187


def test_ties_are_half_right_in_a_calibration():
    bins, error = calibration([0.0] * 4)
    assert (bins[0].accuracy.value, error) == (0.5, 0.0)
