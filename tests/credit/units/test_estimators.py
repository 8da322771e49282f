"""The estimators of unit credit: closed forms, identities, and properties for any value function."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.credit.units.estimators import loo, prefix
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
    return np.array([values[(1 << k) - 1] for k in range(units + 1)])


def lacking(values, units):
    """[K]: the values without unit 0, 1, ..., K - 1."""
    return np.array([values[((1 << units) - 1) & ~(1 << k)] for k in range(units)])


def additive(worth, empty):
    units = len(worth)
    bits = (np.arange(1 << units)[:, None] >> np.arange(units)) & 1
    return empty + bits @ worth


# -- beginnings ----------------------------------------------------------------------------------------------------------


def test_by_hand():
    np.testing.assert_array_equal(prefix(np.array([0.5, 2.0, 1.0, 4.0])), [1.5, -1.0, 3.0])


@given(sizes, seeds)
@settings(max_examples=30, deadline=None)
def test_prefix_sums_to_the_outcome_above_that_of_an_empty_answer(units, seed):
    values = beginnings(drawn(units, seed), units)
    assert prefix(values).sum() == pytest.approx(values[-1] - values[0], abs=1e-12)
    np.testing.assert_allclose(np.cumsum(prefix(values)[::-1])[::-1], values[-1] - values[:-1], atol=1e-12)


# -- all estimators ------------------------------------------------------------------------------------------------------


@given(sizes, seeds)
@settings(max_examples=30, deadline=None)
def test_prefix_and_loo_recover_additive_values(units, seed):
    draws = random_stream(seed, "worth")
    worth, empty = draws.normal(size=units), float(draws.normal())
    values = additive(worth, empty)
    np.testing.assert_allclose(prefix(beginnings(values, units)), worth, atol=1e-12)
    np.testing.assert_allclose(loo(values[-1], lacking(values, units)), worth, atol=1e-12)


@pytest.mark.parametrize(
    ("values", "by_prefix", "by_loo"), [(OR, [1, 0], [0, 0]), (AND, [0, 1], [1, 1])], ids=["or", "and"]
)
def test_two_units_of_which_one_is_enough_or_both_are_needed(values, by_prefix, by_loo):
    np.testing.assert_array_equal(prefix(beginnings(values, 2)), by_prefix)
    np.testing.assert_array_equal(loo(values[-1], lacking(values, 2)), by_loo)


@pytest.mark.parametrize("outcome", [-1.5, 0.0, 2.0])
def test_no_units_and_one_unit(outcome):
    assert len(prefix(np.array([outcome]))) == len(loo(outcome, np.zeros(0))) == 0
    for found in (prefix(np.array([0.25, outcome])), loo(outcome, np.array([0.25]))):
        np.testing.assert_array_equal(found, [outcome - 0.25])
