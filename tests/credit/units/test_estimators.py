"""The estimators of unit credit: closed forms, identities, and properties for any value function."""

import itertools
from math import factorial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.credit.units.estimators import (
    attention,
    coalitions,
    even,
    full_coalition,
    last,
    leave_one_out_coalitions,
    loo,
    prefix,
    sample_orders,
    shapley,
    trunc,
)
from posttrain.seeds import random_stream

OR, AND = (0.0, 1.0, 1.0, 1.0), (0.0, 0.0, 0.0, 1.0)
"""Values of the coalitions of two units: none, the first, the second, both."""
sizes = st.integers(1, 5)
seeds = st.integers(0, 10_000)


def drawn(units, seed):
    """[2^K]: a value for each coalition, at random."""
    return random_stream(seed, "values of coalitions").normal(size=1 << units)


def beginnings(values, units):
    """[K + 1]: the values of the first 0, 1, ..., K units."""
    return np.array([values[full_coalition(k)] for k in range(units + 1)])


def lacking(values, units):
    return np.array([values[members] for members in leave_one_out_coalitions(units)])


def exact(values, units):
    return shapley(units, None, dict(enumerate(values)))


def additive(worth, empty):
    units = len(worth)
    bits = (np.arange(1 << units)[:, None] >> np.arange(units)) & 1
    return empty + bits @ worth


# -- beginnings ----------------------------------------------------------------------------------------------------------


def test_by_hand():
    values = np.array([0.5, 2.0, 1.0, 4.0])
    np.testing.assert_array_equal(prefix(values), [1.5, -1.0, 3.0])
    np.testing.assert_array_equal(trunc(values), [3.5, 2.0, 3.0])


@given(sizes, seeds)
@settings(max_examples=30, deadline=None)
def test_prefix_sums_to_the_outcome_above_that_of_an_empty_answer(units, seed):
    values = beginnings(drawn(units, seed), units)
    assert prefix(values).sum() == pytest.approx(values[-1] - values[0], abs=1e-12)
    np.testing.assert_allclose(np.cumsum(prefix(values)[::-1])[::-1], trunc(values), atol=1e-12)


@given(sizes, seeds)
@settings(max_examples=30, deadline=None)
def test_truncation_counts_unit_j_j_times(units, seed):
    values = beginnings(drawn(units, seed), units)
    assert trunc(values).sum() == pytest.approx(np.arange(1, units + 1) @ prefix(values), abs=1e-12)


def test_the_published_example_of_counting_twice():
    values = additive(np.array([1.0, -0.5, 2.0, 0.3]), 0.0)
    found = trunc(beginnings(values, 4))
    np.testing.assert_allclose(found, [2.8, 1.8, 2.3, 0.3], atol=1e-12)
    assert found.sum() == pytest.approx(7.2)


# -- all estimators ------------------------------------------------------------------------------------------------------


@given(sizes, seeds)
@settings(max_examples=30, deadline=None)
def test_prefix_loo_and_shapley_recover_additive_values(units, seed):
    draws = random_stream(seed, "worth")
    worth, empty = draws.normal(size=units), float(draws.normal())
    values = additive(worth, empty)
    np.testing.assert_allclose(prefix(beginnings(values, units)), worth, atol=1e-12)
    np.testing.assert_allclose(loo(values[-1], lacking(values, units)), worth, atol=1e-12)
    np.testing.assert_allclose(exact(values, units), worth, atol=1e-12)
    np.testing.assert_allclose(trunc(beginnings(values, units)), np.cumsum(worth[::-1])[::-1], atol=1e-12)


@pytest.mark.parametrize(
    ("values", "by_prefix", "by_loo", "by_shapley", "by_trunc"),
    [(OR, [1, 0], [0, 0], [0.5, 0.5], [1, 0]), (AND, [0, 1], [1, 1], [0.5, 0.5], [1, 1])],
    ids=["or", "and"],
)
def test_two_units_of_which_one_is_enough_or_both_are_needed(values, by_prefix, by_loo, by_shapley, by_trunc):
    np.testing.assert_array_equal(prefix(beginnings(values, 2)), by_prefix)
    np.testing.assert_array_equal(loo(values[-1], lacking(values, 2)), by_loo)
    np.testing.assert_array_equal(exact(values, 2), by_shapley)
    np.testing.assert_array_equal(trunc(beginnings(values, 2)), by_trunc)


@pytest.mark.parametrize("outcome", [-1.5, 0.0, 2.0])
def test_no_units_and_one_unit(outcome):
    nothing = np.zeros(0)
    for found in (
        prefix(np.array([outcome])),
        trunc(np.array([outcome])),
        loo(outcome, nothing),
        shapley(0, None, {0: outcome}),
        even(outcome, 0),
        last(outcome, 0),
        attention(outcome, nothing),
    ):
        np.testing.assert_array_equal(found, nothing)
    assert coalitions(0, None) == coalitions(1, None) == []
    empty = 0.25
    alone = [prefix(np.array([empty, outcome])), trunc(np.array([empty, outcome])), loo(outcome, np.array([empty]))]
    for found in [*alone, shapley(1, sample_orders(1, 8, random_stream(0)), {0: empty, 1: outcome})]:
        np.testing.assert_array_equal(found, [outcome - empty])
    for found in (even(outcome, 1), last(outcome, 1), attention(outcome, np.array([0.3]))):
        np.testing.assert_allclose(found, [outcome], rtol=1e-15)


# -- coalitions ----------------------------------------------------------------------------------------------------------


def test_coalitions_are_sets_of_bits():
    assert full_coalition(3) == 0b111
    assert leave_one_out_coalitions(3) == [0b110, 0b101, 0b011]
    assert coalitions(3, None) == [1, 2, 3, 4, 5, 6]
    assert coalitions(3, [np.array([2, 0, 1]), np.array([1, 0, 2])]) == [0b010, 0b011, 0b100, 0b101]


@given(sizes, seeds)
@settings(max_examples=30, deadline=None)
def test_exact_values_are_the_mean_over_all_orders(units, seed):
    values = drawn(units, seed)
    every = [np.array(order) for order in itertools.permutations(range(units))]
    assert len(every) == factorial(units)
    np.testing.assert_allclose(shapley(units, every, dict(enumerate(values))), exact(values, units), atol=1e-12)


@given(sizes, seeds, st.integers(2, 5))
@settings(max_examples=30, deadline=None)
def test_sampled_values_sum_to_the_outcome_above_that_of_an_empty_answer(units, seed, permutations):
    values = drawn(units, seed)
    chosen = sample_orders(units, permutations, random_stream(seed, "orders"))
    needed = {members: values[members] for members in [0, *coalitions(units, chosen), full_coalition(units)]}
    assert shapley(units, chosen, needed).sum() == pytest.approx(values[-1] - values[0], abs=1e-12)


@given(st.integers(2, 5), seeds)
@settings(max_examples=30, deadline=None)
def test_equal_units_get_equal_credit_and_null_units_get_none(units, seed):
    draws = random_stream(seed, "unit names")
    a, b = (int(unit) for unit in draws.permutation(units)[:2])
    values = drawn(units, seed)
    bits = (np.arange(1 << units)[:, None] >> np.arange(units)) & 1
    exchanged = bits.copy()
    exchanged[:, [a, b]] = bits[:, [b, a]]
    swap = exchanged @ (1 << np.arange(units))
    alike = exact(values + values[swap], units)
    assert alike[a] == pytest.approx(alike[b], abs=1e-12)
    # `a` is made to add nothing.
    null = values[np.arange(1 << units) & ~(1 << a)]
    chosen = sample_orders(units, 4, draws)
    for found in (exact(null, units), shapley(units, chosen, dict(enumerate(null)))):
        assert found[a] == pytest.approx(0, abs=1e-12)
    assert loo(null[-1], lacking(null, units))[a] == 0


@given(st.integers(2, 9), st.integers(2, 9), seeds)
@settings(max_examples=60, deadline=None)
def test_each_second_order_reverses_the_one_before(units, permutations, seed):
    chosen = sample_orders(units, permutations, random_stream(seed, "orders"))
    if chosen is None:
        assert 2**units - 2 <= permutations * (units - 1)
        return
    assert len(coalitions(units, chosen)) <= permutations * (units - 1) < 2**units - 2
    assert len(chosen) == permutations
    for order in chosen:
        assert sorted(order.tolist()) == list(range(units))
    for forth, back in zip(chosen[::2], chosen[1::2], strict=False):
        np.testing.assert_array_equal(forth[::-1], back)


def test_a_pair_of_orders_is_exact_for_pairwise_interactions():
    # In an order and its reverse, each of two units comes first once: so their joint worth is halved exactly.
    draws = random_stream(0, "pairs")
    units = 6
    bits = ((np.arange(1 << units)[:, None] >> np.arange(units)) & 1).astype(float)
    joint = np.triu(draws.normal(size=(units, units)))
    values = np.einsum("si,ij,sj->s", bits, joint, bits)
    one = draws.permutation(units)
    found = shapley(units, [one, one[::-1]], dict(enumerate(values)))
    np.testing.assert_allclose(found, exact(values, units), atol=1e-12)
    assert np.abs(shapley(units, [one], dict(enumerate(values))) - found).max() > 0.1


def test_sampled_values_are_right_on_average_odd_numbers_of_orders_included():
    units, values, draws = 5, drawn(5, 0), random_stream(0, "many orders")
    for permutations in (2, 3):
        found = np.stack(
            [shapley(units, sample_orders(units, permutations, draws), dict(enumerate(values))) for _ in range(3000)]
        )
        error = (found.mean(0) - exact(values, units)) / (found.std(0) / np.sqrt(len(found)))
        assert found.std(0).min() > 0.05
        assert np.abs(error).max() < 4.5


# -- shares --------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.floats(-5, 5), seeds)
@settings(max_examples=30, deadline=None)
def test_shares_sum_to_the_outcome(units, outcome, seed):
    weights = random_stream(seed, "attention").random(units)
    for found in (even(outcome, units), last(outcome, units), attention(outcome, weights)):
        assert found.shape == (units,)
        assert found.sum() == pytest.approx(outcome, abs=1e-12)
    np.testing.assert_allclose(attention(outcome, 3 * weights), attention(outcome, weights), atol=1e-12)
    assert last(outcome, units)[:-1].any() == 0
    assert len(set(even(outcome, units))) == 1


def test_attention_by_hand():
    np.testing.assert_array_equal(attention(2.0, np.array([1.0, 0.0, 3.0])), [0.5, 0.0, 1.5])
    np.testing.assert_array_equal(attention(2.0, np.zeros(4)), [0.5] * 4)
