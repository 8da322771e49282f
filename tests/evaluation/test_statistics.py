import math

import numpy as np
import pytest
from scipy import stats

from posttrain.evaluation.statistics import calibration, estimate, item_sums, probability_above, ratio
from posttrain.runs.intervals import mean_difference


@pytest.mark.parametrize(("rows", "least"), [(10, 0.935), (30, 0.935)])
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
    known, plain = ratio(sums, [2] * 4), mean_difference([one / 2 for one in sums])
    assert known.value == pytest.approx(plain.value)
    # To the first order of the logarithm.
    assert known.low == pytest.approx(plain.low, rel=0.1)
    assert ratio([0.01, 5, 0.01, 3], [3, 5, 2, 4]).low > 0
    # Two rows, or three of which one has most tokens, would have limits a factor of hundreds away.
    assert math.isnan(ratio([3.0], [2]).low)
    assert math.isnan(ratio([1.0, 5, 1], [3, 40, 2]).low)
    for sums, counts in (([2.0, 4.0], [1, 2]), ([2.0, 4.0], [2, 2]), ([2.0, 0.0], [1, 0])):
        assert math.isnan(ratio(sums, counts).low)
    with pytest.raises(ValueError, match="same length"):
        ratio([1.0], [1, 2])


def test_a_perplexity_has_the_interval_of_its_nats():
    known = estimate(item_sums("perplexity", ((str(i), (3.0 + i, 2.0)) for i in range(5))))
    nats = ratio([3.0, 4.0, 5.0, 6.0, 7.0], [2.0] * 5)
    assert known.limits == pytest.approx(np.exp(nats.limits))
    assert (known.n, known.low > 1) == (5, True)


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
