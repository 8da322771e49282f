"""Estimates with intervals: closed forms, coverage, sacrebleu's own corpus scores, rankings of compared answers and their calibration."""

import math

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from posttrain.evaluation.predictions import read_predictions
from posttrain.evaluation.statistics import (
    ItemScores,
    calibration,
    combine,
    estimate,
    item_means,
    item_sums,
    pair_accuracy,
    probability_above,
    ratio,
    resampled_sums,
)
from posttrain.evaluation.text_metrics import corpus_metric
from posttrain.runs.intervals import mean_difference, success_rate
from posttrain.seeds import random_stream
from tests.evaluation.made import predictions

VALUES = st.lists(st.floats(-100, 100), min_size=1, max_size=25)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", ["bleu", "chrf"])
def test_the_corpus_score_is_sacrebleus(tmp_path, name, samples):
    rows = read_predictions(str(predictions(tmp_path / "p.jsonl", 0.4, samples=samples))).rows
    measured = corpus_metric(name, rows)
    texts, references = [row.text for row in rows], [[row.reference for row in rows]]
    metric = sacrebleu.BLEU() if name == "bleu" else sacrebleu.CHRF()
    known = metric.corpus_score(texts, references)
    found = estimate(measured.scores)
    assert found.value == pytest.approx(known.score, abs=1e-9)
    assert measured.about["signature"] == str(metric.get_signature())
    assert 0 <= found.low < found.value < found.high <= 100
    assert (found.n, measured.texts) == (30, 30 * samples)


def test_corpus_bleu_is_not_the_mean_over_sentences(tmp_path):
    rows = read_predictions(str(predictions(tmp_path / "p.jsonl", 0.5))).rows
    scores = corpus_metric("bleu", rows).scores
    assert abs(estimate(scores).value - scores.values().mean()) > 0.5


@settings(max_examples=40, deadline=None)
@given(VALUES)
def test_the_interval_contains_the_value(values):
    bounds = (min(values), max(values) + 1)
    found = estimate(item_means("mean", ((str(i), v) for i, v in enumerate(values)), bounds))
    assert found.value == pytest.approx(np.mean(values), abs=1e-9)
    assert bounds[0] <= found.low <= found.value <= found.high <= bounds[1]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=4, max_size=12).filter(lambda v: np.std(v) > 0.1))
def test_more_items_of_the_same_kind_narrow_it(values):
    def width(copies: int) -> float:
        many = estimate(item_means("mean", ((str(i), v) for i, v in enumerate(values * copies)), (-10, 10)))
        return many.high - many.low

    assert width(16) < width(1) * 0.5


def test_samples_of_an_item_are_one_item():
    twice = [(str(i % 20), float(i % 20 < 7)) for i in range(200)]
    found = estimate(item_means("rate", twice))
    once = estimate(item_means("rate", twice[:20]))
    assert found == once
    assert found.n == 20
    uneven = item_means("mean", [("a", 1.0), ("a", 1.0), ("a", 1.0), ("b", 0.0)])
    assert estimate(uneven).value == 0.5
    found = estimate(item_means("rate", ((str(i), float(i < 2)) for i in range(7))))
    assert (found.low, found.high) == pytest.approx((success_rate(2, 7).low, success_rate(2, 7).high))


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("n", [1, 12])
def test_a_rate_of_equal_items_has_an_interval(value, n):
    found = estimate(item_means("rate", ((str(i), value) for i in range(n))))
    known = success_rate(int(value * n), n)
    assert (found.low, found.high, found.n) == (known.low, known.high, n)


def test_perplexity_is_of_all_tokens():
    scores = item_sums("perplexity", [("a", (10.0, 10)), ("b", (2.0, 1)), ("b", (0.0, 1))])
    assert estimate(scores).value == pytest.approx(math.exp(12 / 12))
    assert scores.values(["b"])[0] == pytest.approx(math.exp(1.0))
    with pytest.raises(ValueError, match="at least one item"):
        estimate(ItemScores("mean", {}))
    assert combine("mean", np.array([[3.0, 2.0], [1.0, 4.0]])) == pytest.approx([1.5, 0.25])


@pytest.mark.parametrize("n", [2, 5, 10])
def test_intervals_of_few_items_cover(n):
    generator = np.random.default_rng(n)
    hits = 0
    for _ in range(400):
        values = generator.beta(2, 2, size=n)
        found = estimate(item_means("mean", ((str(i), v) for i, v in enumerate(values)), (0, 1)))
        hits += found.low <= 0.5 <= found.high
    assert hits / 400 >= 0.92


def test_tables_of_the_same_items_use_the_same_resamples():
    table = np.random.default_rng(0).normal(size=(15, 2))
    drawn = resampled_sums(table, seed=3, draws=40)
    assert np.allclose(resampled_sums(2 * table, seed=3, draws=40), 2 * drawn)
    assert not np.allclose(resampled_sums(table, seed=4, draws=40), drawn)
    assert np.allclose(resampled_sums(np.ones((15, 1)), draws=9), 15)
    wide, generator = np.arange(2.0**17)[:, None], random_stream("items", 2**17, 0)  # computed two at a time
    one_by_one = [[wide[generator.integers(len(wide), size=len(wide))].sum()] for _ in range(5)]
    assert np.array_equal(resampled_sums(wide, draws=5), one_by_one)


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


@pytest.mark.parametrize(("seeds", "runs"), [(3, 200), (5, 200), (10, 200), (40, 60)])
def test_the_interval_of_a_probability_of_improvement_covers(seeds, runs):
    """A bootstrap covers 86% to 93%."""
    draws = np.random.default_rng(0)
    hits = 0
    for _ in range(runs):
        known = probability_above([draws.normal(1, 1, seeds)], [draws.normal(0, 1, seeds)])
        hits += known.low <= 0.7602 <= known.high  # P(N(1, 2) > 0)
    assert hits >= (187 if runs == 200 else 54)


def ranking_accuracy(chosen, rejected):
    return probability_above([chosen], [rejected])


def test_a_tie_is_half():
    all_tied = pair_accuracy([0.0] * 100)
    assert all_tied.value == 0.5
    assert all_tied.limits == success_rate(50, 100).limits
    assert pair_accuracy([1, 0, 0, -1]).value == 0.5
    assert pair_accuracy([1, 1, 1, 0]).value == 0.875


def test_ranking_is_the_area_under_the_curve():
    found = ranking_accuracy([3, 2, 1], [2.5, 0, 1])
    assert found.value == pytest.approx((3 + 2 + 1.5) / 9)
    assert found.n == 6
    assert found.low < found.value < found.high
    assert ranking_accuracy([3, 2, 1], [2.5, 0, 1]) == found
    with pytest.raises(ValueError, match="each side"):
        ranking_accuracy([1], [])
    found = ranking_accuracy([1.5], [*range(2), *range(2, 20)])
    assert found.value == 0.1
    assert found.low < 0.02
    assert found.high > 0.7
    many = ranking_accuracy([1.5] * 3, [*range(2), *range(2, 20)])
    assert many.high < found.high


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


def test_the_calibration_error_separates_calibrated_from_overconfident_models():
    rng = np.random.default_rng(1)
    size = np.abs(rng.normal(0, 2, 20_000))
    right = rng.random(20_000) < 1 / (1 + np.exp(-size))
    margins = np.where(right, size, -size)
    bins, error = calibration(list(margins))
    assert error < 0.02
    assert sum(b.accuracy.n for b in bins) == 20_000
    assert [b.low for b in bins] == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9])
    assert calibration(list(5 * margins))[1] > 0.1
    bins, error = calibration([0.0] * 4)
    assert (bins[0].accuracy.value, error) == (0.5, 0.0)
    bins, error = calibration([10.0, 10.0, -10.0])  # empty bins are left out
    assert len(bins) == 1
    assert error == pytest.approx(1 - 2 / 3, abs=1e-3)
