"""Paired tests: closed forms, scipy, coverage, and properties of the bootstrap."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from posttrain.evaluation.paired import paired_test, t_test
from posttrain.evaluation.statistics import (
    holm,
    item_means,
    item_sums,
    mcnemar,
    odds_ratio,
    paired_rates,
    standardized_difference,
)
from posttrain.runs.intervals import success_rate

COUNTS = st.tuples(*[st.integers(0, 30)] * 4).filter(lambda counts: sum(counts) > 1)


def scores(values, kind="mean"):
    return item_means(kind, ((str(place), value) for place, value in enumerate(values)))


def names(n):
    return [str(place) for place in range(n)]


def answers(counts):
    """0 and 1 of both sides on items that both, only A, only B and neither got right."""
    pairs = np.repeat([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], counts, axis=0)
    return pairs[:, 0].tolist(), pairs[:, 1].tolist()


@given(st.integers(0, 200), st.integers(0, 200))
def test_mcnemar_is_scipys_binomial_test(only_a, only_b):
    known = stats.binomtest(only_a, only_a + only_b, 0.5).pvalue if only_a + only_b else 1.0
    assert mcnemar(only_a, only_b) == pytest.approx(known, rel=1e-9)
    assert mcnemar(only_a, only_b) == mcnemar(only_b, only_a)


@given(st.integers(0, 60), st.integers(0, 60))
def test_the_odds_ratio_has_the_exact_interval_of_a_rate(only_a, only_b):
    found = odds_ratio(only_a, only_b)
    if not only_a + only_b:
        assert math.isnan(found.value)
        return
    known = success_rate(only_b, only_a + only_b)
    for limit, share in ((found.low, known.low), (found.high, known.high)):
        assert limit == (math.inf if share == 1 else pytest.approx(share / (1 - share), rel=1e-9, abs=1e-12))
    assert found.value == (pytest.approx(only_b / only_a) if only_a else math.inf)
    assert found.low <= found.value <= found.high


@given(COUNTS)
def test_the_difference_of_paired_rates_is_antisymmetric_and_within_one(counts):
    a, b = answers(counts)
    there, back = paired_rates(a, b), paired_rates(b, a)
    assert there.value == pytest.approx((counts[2] - counts[1]) / sum(counts))
    assert (back.value, back.low, back.high) == pytest.approx((-there.value, -there.high, -there.low))
    assert -1 <= there.low <= there.value <= there.high <= 1
    assert there.low < there.high


def test_without_correlation_it_is_the_interval_of_independent_samples():
    a, b = answers((6, 4, 9, 6))  # 6 * 6 = 4 * 9
    found, one, other = paired_rates(a, b), success_rate(15, 25), success_rate(10, 25)
    # Newcombe 1998b, method 10.
    below = math.hypot(one.value - one.low, other.high - other.value)
    above = math.hypot(one.high - one.value, other.value - other.low)
    assert (found.low, found.high) == pytest.approx((0.2 - below, 0.2 + above))
    alike = paired_rates(*answers((12, 1, 2, 10)))
    assert alike.high - alike.low < found.high - found.low


def test_the_interval_of_paired_rates_covers():
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(500):
        skill = generator.random(60)
        a, b = generator.random(60) < skill * 0.8, generator.random(60) < skill * 0.8 + 0.1
        found = paired_rates(a, b)
        hits += found.low <= 0.1 <= found.high
    assert 0.93 <= hits / 500 <= 0.995


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm(p_values):
    order = np.argsort(p_values)
    factors = len(p_values) - np.arange(len(p_values))
    expected = np.minimum(np.maximum.accumulate(np.sort(p_values) * factors), 1)
    assert np.array(holm(p_values))[order] == pytest.approx(expected)


def test_the_standardised_difference():
    found = standardized_difference([1.0, 2.0, 3.0, 2.0])
    assert found.value == pytest.approx(2 / np.std([1, 2, 3, 2], ddof=1))
    many = standardized_difference([1.0, 2.0, 3.0, 2.0] * 5)
    assert many.low <= many.value <= many.high
    assert math.isnan(standardized_difference([1.0, 1.0]).value)
    assert math.isnan(standardized_difference([0.1 + 0.2 - 0.3 + 1, 1.0, 1.0]).value)
    few = standardized_difference([1.0, 3.0])
    assert few.value == pytest.approx(2**0.5)
    assert math.isnan(few.low)
    assert math.isnan(few.high)
    assert abs(standardized_difference([0.1] * 12 + [0.1 + 0.7]).high) < 100
    unequal = standardized_difference([-1.0, -0.1, -0.1, *[0.0] * 61])
    assert unequal.low < 0 < unequal.high  # as the interval of the mean


@pytest.mark.parametrize("n", [3, 5, 10, 40])
def test_the_interval_of_an_effect_covers(n):
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        known = standardized_difference(generator.normal(0.5, 1, size=n).tolist())
        hits += known.low <= 0.5 <= known.high
    assert 0.93 <= hits / 400 <= 0.975


@pytest.mark.parametrize("counts", [(5, 1, 9, 5), (10, 0, 0, 10), (3, 4, 4, 0)])
def test_right_or_wrong_answers_of_one_run_get_mcnemars_test(counts):
    a, b = answers(counts)
    found = paired_test("success", "higher", [scores(a, "rate")], [scores(b, "rate")], names(len(a)))
    assert (found.test, found.p, found.n) == ("McNemar, exact", mcnemar(counts[1], counts[2]), sum(counts))
    assert found.difference == paired_rates(a, b)
    assert (found.a, found.b) == (np.mean(a), np.mean(b))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=2, max_size=20))
def test_the_t_test_is_antisymmetric_and_its_interval_contains_the_difference(pairs):
    a, b = ([pair[side] for pair in pairs] for side in (0, 1))
    there = paired_test("score", "higher", [scores(a)], [scores(b)], names(len(a)), draws=300)
    back = paired_test("score", "higher", [scores(b)], [scores(a)], names(len(a)), draws=300)
    assert there.difference.value == pytest.approx(np.mean(b) - np.mean(a), abs=1e-9)
    assert not there.difference.low > there.difference.value
    assert not there.difference.value > there.difference.high
    assert (back.difference.low, back.difference.high) == pytest.approx(
        (-there.difference.high, -there.difference.low), abs=1e-9, nan_ok=True
    )
    assert back.p == pytest.approx(there.p)
    assert 2.0 ** (1 - len(a)) <= there.p <= 1


def test_pairing_removes_the_variance_between_items():
    generator = np.random.default_rng(3)
    hard = generator.normal(0, 10, size=80)
    found = paired_test("score", "higher", [scores(hard)], [scores(hard + 1 + generator.normal(0, 0.2, 80))], names(80))
    assert 0.9 < found.difference.low < 1 < found.difference.high < 1.1
    assert found.p < 1e-12
    assert replace(found, corrected=found.p).better_side == "B"


@pytest.mark.parametrize(("runs", "n"), [((1, 1), 3), ((1, 1), 20), ((2, 2), 20), ((1, 2), 20)])
def test_equal_sides_are_separated_in_at_most_five_percent(runs, n):
    generator = np.random.default_rng(0)
    between, drawn = 0.0 if runs == (1, 1) else 0.3, []
    for _ in range(60):
        hard = generator.normal(size=n)
        shifts = [between * generator.normal(size=r) for r in runs]
        sides = [[scores(hard + shift + generator.normal(size=n)) for shift in side] for side in shifts]
        drawn.append(paired_test("s", "higher", *sides, names(n), draws=60).p)
    assert np.mean(np.array(drawn) < 0.05) <= 0.1
    assert np.median(drawn) >= 0.35


def test_with_one_run_it_is_the_paired_t_test_over_items():
    generator = np.random.default_rng(5)
    a, b = generator.normal(size=12), generator.normal(0.6, 1, size=12)
    found, known = paired_test("s", "higher", [scores(a)], [scores(b)], names(12)), stats.ttest_rel(b, a)
    limits = known.confidence_interval(0.95)
    assert found.p == pytest.approx(known.pvalue, rel=0.1)
    assert (found.difference.low, found.difference.high) == pytest.approx((limits.low, limits.high), abs=0.03)


@pytest.mark.parametrize(
    ("a", "b", "paired", "known"),
    [
        ([0.1, 0.5, 0.3], [0.9, 1.3, 0.6, 0.8], False, partial(stats.ttest_ind, equal_var=False)),
        ([0.2], [0.9, 1.3, 0.6, 0.8], False, stats.ttest_ind),
        ([0.1, 0.5, 0.3], [0.3, 0.6, 0.5], True, stats.ttest_rel),
    ],
)
def test_over_runs_it_is_welchs_t_test_or_the_paired_one(a, b, paired, known):
    found, p = t_test(a, b, 0.0, 100, paired)
    limits = known(b, a).confidence_interval(0.95)
    assert (p, found.low, found.high) == pytest.approx((known(b, a).pvalue, limits.low, limits.high))
    assert not paired or p < 0.05 < t_test(a, b, 0.0, 100)[1]


def test_what_could_have_been_seen_is_seen_in_four_of_five_comparisons():
    draws, sizes, seen = np.random.default_rng(4), [], []
    for _ in range(200):
        noise = draws.normal(0, 1, 60)
        test = paired_test("s", "higher", [scores([0.0] * 60)], [scores(noise)], names(60), draws=60)
        sizes.append(test.visible())
        planted = scores(draws.normal(np.mean(sizes), 1, 60))
        seen.append(paired_test("s", "higher", [scores([0.0] * 60)], [planted], names(60), draws=60).p < 0.05)
        assert test.visible(0.01) > test.visible()
    assert np.mean(sizes) == pytest.approx(2.8016 / 60**0.5, rel=0.06)
    assert 0.7 < np.mean(seen) < 0.9


@pytest.mark.parametrize("differing", [0, 10, 30])
def test_what_mcnemars_test_could_have_seen_is_seen_in_four_of_five_comparisons(differing):
    """Half of the `differing` of 60 items were lost and half gained. With as many that differ, or more where the gain is larger,
    the gain is found."""
    before = answers((15, differing // 2, differing // 2, 45 - differing))
    test = paired_test("success", "higher", *([scores(side, "rate")] for side in before), names(60))
    gain, draws = test.visible(), np.random.default_rng(differing)
    assert 0 < gain < 1
    share = max(differing / 60, gain)
    drawn = draws.multinomial(60, [(share - gain) / 2, (share + gain) / 2, 1 - share], 3000)
    found = np.mean([mcnemar(lost, gained) < 0.05 and gained > lost for lost, gained, _ in drawn])
    assert found == pytest.approx(0.8, abs=0.03)


def test_a_comparison_that_can_show_nothing_says_so():
    """Two runs against one leave one degree of freedom, and five items no test at 5%."""
    one, two, three = (scores([float(n % 10 < hits) for n in range(40)], "rate") for hits in (3, 5, 8))
    assert paired_test("s", "higher", [one], [two, three], names(40), draws=200).visible() == math.inf
    few = [scores([float(n < hits) for n in range(5)], "rate") for hits in (1, 4)]
    assert paired_test("s", "higher", few[:1], few[1:], names(5)).visible() == math.inf
    six = scores([0.0] * 6, "rate")
    same = paired_test("s", "higher", [six], [six], names(6)).visible()
    assert same**6 == pytest.approx(0.8, abs=1e-3)  # all six have to change


@pytest.mark.parametrize("n", [2, 3, 5])
def test_five_items_are_inconclusive_for_any_differences(n):
    found = paired_test("s", "higher", [scores([1.0] * n)], [scores([2.0] * n)], names(n), draws=100)
    assert found.p == 2.0 ** (1 - n)
    assert replace(found, corrected=found.p).better_side is None


def test_equal_answers_have_no_difference():
    same = scores([0.5, 1.5, 2.5])
    found = paired_test("score", "higher", [same], [same], names(3), draws=100)
    assert (found.difference.value, found.p, found.better_side, found.limits) == (0.0, 1.0, None, "–")
    assert math.isnan(found.difference.low)
    assert math.isnan(found.difference.high)
    assert math.isnan(found.effect.value)
    with pytest.raises(ValueError, match="two items"):
        paired_test("score", "higher", [same], [same], names(1))


def test_an_effect_of_several_runs_has_no_interval_over_items_alone():
    levels = [0.5, 1.5, 2.5, 3.5], [0.0, 1.0, 2.5, 3.0], [0.5, 2.0, 3.0, 4.0]
    one, other, more = (scores(level * 5) for level in levels)
    alone = paired_test("score", "higher", [one], [more], names(20), draws=100).effect
    several = paired_test("score", "higher", [one, other], [more, more], names(20), draws=100).effect
    assert 0 < alone.low < alone.value
    assert several.value > 0
    assert math.isnan(several.low)
    assert math.isnan(several.high)


def perplexities(nats, tokens):
    return item_sums("perplexity", ((str(i), (x, tokens)) for i, x in enumerate(nats)))


def test_perplexities_are_tested_as_nats_per_token():
    """One hard row does not hide that all rows became easier: Student's t on the nats, with limits of the ratio."""
    before = [11.4, 2.1, 2.2, 2.9, 2.4, 1.9, 2.6, 2.0, 3.1, 2.2]
    after = [0.01, 0.02, 0.01, 0.0, 0.03, 0.01, *[0.02] * 4]
    a, b = perplexities(before, 1), perplexities(after, 1)
    found = paired_test("perplexity", "lower", [a], [b], names(10))
    known = stats.ttest_rel(after, before)
    assert (replace(found, corrected=found.p).better_side, found.effect) == ("B", None)
    assert (found.a, found.b) == pytest.approx((math.exp(3.28), math.exp(0.016)))
    assert found.difference.value == pytest.approx(math.exp(0.016) - math.exp(3.28))
    assert found.p == pytest.approx(known.pvalue, rel=0.2)
    limits = math.exp(3.28) * np.expm1(known.confidence_interval())
    assert (found.difference.low, found.difference.high) == pytest.approx(tuple(limits), rel=0.02)


def test_runs_that_differ_widen_the_interval():
    items = np.random.default_rng(1).normal(size=50)
    a = [scores(items + shift) for shift in (-0.5, 0.0, 0.5)]
    b = [scores(items + 0.2 + shift) for shift in (-0.5, 0.0, 0.5)]
    one = paired_test("score", "higher", a[1:2], b[1:2], names(50), draws=500)
    several = paired_test("score", "higher", a, b, names(50), draws=2000)
    assert math.isnan(one.difference.low)  # the same difference for every item
    assert several.difference.value == pytest.approx(0.2)
    assert several.runs == (3, 3)
    # Nothing but the runs varies: the variance is that of two means of three runs of standard deviation 0.5.
    # Student's quantile with 4 degrees of freedom.
    width = several.difference.high - several.difference.low
    assert width == pytest.approx(2 * 2.776 * 0.5 * math.sqrt(2 / 3), rel=0.01)
