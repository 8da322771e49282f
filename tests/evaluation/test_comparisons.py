"""Rankings of compared answers: closed-form values, ties, and the calibration of confident rewards."""

import numpy as np
import pytest

from posttrain.evaluation.statistics import calibration, pair_accuracy, probability_above
from posttrain.runs.intervals import success_rate


def ranking_accuracy(chosen, rejected):
    return probability_above([chosen], [rejected])


def test_pairs_are_a_rate_where_none_is_tied():
    assert pair_accuracy([1, 2, -1, 0.5]) == success_rate(3, 4)


def test_a_tie_is_half():
    all_tied = pair_accuracy([0.0] * 100)
    assert all_tied.value == 0.5
    assert all_tied.limits == success_rate(50, 100).limits
    assert pair_accuracy([1, 0, 0, -1]).value == 0.5
    assert pair_accuracy([1, 1, 1, 0]).value == 0.875


def test_ranking_is_the_area_under_the_curve():
    estimate = ranking_accuracy([3, 2, 1], [2.5, 0, 1])
    assert estimate.value == pytest.approx((3 + 2 + 1.5) / 9)
    assert estimate.n == 6
    assert estimate.low < estimate.value < estimate.high
    assert ranking_accuracy([3, 2, 1], [2.5, 0, 1]) == estimate
    with pytest.raises(ValueError, match="each side"):
        ranking_accuracy([1], [])


@pytest.mark.parametrize("few", [1, 2, 5])
def test_a_ranking_of_few_answers_is_never_certain(few):
    good, bad = [2.0 + n for n in range(few)], [-1.0 * n for n in range(40)]
    right, wrong = ranking_accuracy(good, bad), ranking_accuracy(bad, good)
    tied = ranking_accuracy([0.0] * few, [0] * 9)
    expected = success_rate(few, few)
    assert (right.value, right.low, right.high, right.n) == (1.0, expected.low, 1.0, few + 40)
    assert (wrong.value, wrong.low) == (0.0, 0.0)
    assert wrong.high == pytest.approx(1 - expected.low)
    assert tied.value == 0.5
    assert tied.low < 0.5 - 0.6 / (few + 4) ** 0.5
    assert tied.high - 0.5 == pytest.approx(0.5 - tied.low)


def test_the_spread_of_a_single_answer_is_unknown():
    estimate = ranking_accuracy([1.5], [*range(2), *range(2, 20)])
    assert estimate.value == 0.1
    assert estimate.low < 0.02
    assert estimate.high > 0.7
    many = ranking_accuracy([1.5] * 3, [*range(2), *range(2, 20)])
    assert many.high < estimate.high


def test_accuracy_of_few_pairs_is_never_certain():
    for n in (1, 2, 7):
        assert pair_accuracy([1.0] * n).low == success_rate(n, n).low < 0.7
        assert pair_accuracy([-1.0] * n).high == success_rate(0, n).high
    assert calibration([2.0, 3.0])[0][0].accuracy.low < 0.5


def test_the_interval_of_a_ranking_covers():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(60):
        estimate = ranking_accuracy(list(rng.normal(1, 1, 40)), list(rng.normal(0, 1, 40)))
        hits += estimate.low <= 0.7602 <= estimate.high  # P(N(1, 2) > 0)
    assert hits >= 54


def test_calibration_error_is_small_for_a_calibrated_model_and_large_for_an_overconfident_one():
    rng = np.random.default_rng(1)
    size = np.abs(rng.normal(0, 2, 20_000))
    right = rng.random(20_000) < 1 / (1 + np.exp(-size))
    margins = np.where(right, size, -size)
    bins, error = calibration(list(margins))
    assert error < 0.02
    assert sum(b.accuracy.n for b in bins) == 20_000
    assert [b.low for b in bins] == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9])
    assert calibration(list(5 * margins))[1] > 0.1


def test_empty_bins_are_left_out():
    bins, error = calibration([10.0, 10.0, -10.0])
    assert len(bins) == 1
    assert error == pytest.approx(1 - 2 / 3, abs=1e-3)
