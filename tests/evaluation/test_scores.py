"""Summed statistics: sacrebleu's own corpus scores, and what intervals must be like."""

import math

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.evaluation.predictions import read_predictions
from posttrain.evaluation.statistics import (
    ItemScores,
    combine,
    estimate,
    item_means,
    item_sums,
    resampled_sums,
    success_rate,
)
from posttrain.evaluation.text_metrics import corpus_metric
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


@pytest.mark.parametrize("n", [2, 5, 10])
def test_intervals_of_few_items_cover(n):
    generator = np.random.default_rng(n)
    hits = 0
    for _ in range(400):
        values = generator.beta(2, 2, size=n)
        found = estimate(item_means("mean", ((str(i), v) for i, v in enumerate(values)), (0, 1)))
        hits += found.low <= 0.5 <= found.high
    assert hits / 400 >= 0.92


def test_a_rate_has_its_exact_interval():
    found = estimate(item_means("rate", ((str(i), float(i < 2)) for i in range(7))))
    assert (found.low, found.high) == pytest.approx((success_rate(2, 7).low, success_rate(2, 7).high))


def test_tables_of_the_same_items_use_the_same_resamples():
    table = np.random.default_rng(0).normal(size=(15, 2))
    drawn = resampled_sums(table, seed=3, draws=40)
    assert np.allclose(resampled_sums(2 * table, seed=3, draws=40), 2 * drawn)
    assert not np.allclose(resampled_sums(table, seed=4, draws=40), drawn)
    assert np.allclose(resampled_sums(np.ones((15, 1)), draws=9), 15)


def test_no_values_give_no_estimate():
    with pytest.raises(ValueError, match="at least one item"):
        estimate(ItemScores("mean", {}))
    assert combine("mean", np.array([[3.0, 2.0], [1.0, 4.0]])) == pytest.approx([1.5, 0.25])
