"""The estimators of unit credit: closed forms, identities, and properties for any value function."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.credit.units.estimators import even, full_coalition, last, leave_one_out_coalitions, loo, prefix, trunc
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
def test_prefix_and_loo_recover_additive_values(units, seed):
    draws = random_stream(seed, "worth")
    worth, empty = draws.normal(size=units), float(draws.normal())
    values = additive(worth, empty)
    np.testing.assert_allclose(prefix(beginnings(values, units)), worth, atol=1e-12)
    np.testing.assert_allclose(loo(values[-1], lacking(values, units)), worth, atol=1e-12)
    np.testing.assert_allclose(trunc(beginnings(values, units)), np.cumsum(worth[::-1])[::-1], atol=1e-12)


@pytest.mark.parametrize(
    ("values", "by_prefix", "by_loo", "by_trunc"),
    [(OR, [1, 0], [0, 0], [1, 0]), (AND, [0, 1], [1, 1], [1, 1])],
    ids=["or", "and"],
)
def test_two_units_of_which_one_is_enough_or_both_are_needed(values, by_prefix, by_loo, by_trunc):
    np.testing.assert_array_equal(prefix(beginnings(values, 2)), by_prefix)
    np.testing.assert_array_equal(loo(values[-1], lacking(values, 2)), by_loo)
    np.testing.assert_array_equal(trunc(beginnings(values, 2)), by_trunc)


@pytest.mark.parametrize("outcome", [-1.5, 0.0, 2.0])
def test_no_units_and_one_unit(outcome):
    nothing = np.zeros(0)
    for found in (
        prefix(np.array([outcome])),
        trunc(np.array([outcome])),
        loo(outcome, nothing),
        even(outcome, nothing.astype(bool)),
        last(outcome, 0),
    ):
        np.testing.assert_array_equal(found, nothing)
    empty = 0.25
    alone = [prefix(np.array([empty, outcome])), trunc(np.array([empty, outcome])), loo(outcome, np.array([empty]))]
    for found in alone:
        np.testing.assert_array_equal(found, [outcome - empty])
    for found in (even(outcome, np.array([True])), last(outcome, 1)):
        np.testing.assert_allclose(found, [outcome], rtol=1e-15)


# -- shares --------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.floats(-5, 5))
@settings(max_examples=30, deadline=None)
def test_shares_sum_to_the_outcome(units, outcome):
    every = np.ones(units, dtype=bool)
    for found in (even(outcome, every), last(outcome, units)):
        assert found.shape == (units,)
        assert found.sum() == pytest.approx(outcome, abs=1e-12)
    assert last(outcome, units)[:-1].any() == 0
    assert len(set(even(outcome, every))) == 1
