"""Filters on groups and the overlong penalty."""

import pytest

from posttrain.recipe.rollout import OverlongRecipe
from posttrain.rollout.filters import has_signal, most_uncertain, overlong_penalty

from .episodes import played


def group(number, *returns):
    return [played(group=number, index=i, rewards=(r,)) for i, r in enumerate(returns)]


A, B, C, D = group(0, 1.0, 1.0), group(1, 0.0, 4.0), group(2, 0.0, 1.0), group(3, 0.0, 2.0)


def kept(groups, share):
    return [g[0].group for g in most_uncertain(groups, share)]


def test_the_most_uncertain_groups_are_kept_in_order():
    assert kept([A, D, C, B], 0.5) == [3, 1]
    assert kept([A, D, C, B], 0.25) == [1]
    assert kept([A, D, C, B], 0.01) == [1]

    assert kept([A, D, C, B], 1.0) == [3, 2, 1]
    assert kept([group(5, 1.0, 1.0), group(4, 2.0, 2.0)], 0.5) == [4]

    assert len(most_uncertain([group(i, 0.0, 1.0 + i) for i in range(30)], 0.1)) == 3

    assert most_uncertain([[], []], 0.5) == []
    assert kept([[], B], 0.5) == [1]


def test_signal_needs_returns_that_differ():
    assert has_signal(B)
    assert not has_signal(A)
    assert not has_signal([])
    assert not has_signal(B[:1])
    assert not has_signal([played(rewards=(0.1, 0.2)), played(rewards=(0.3,))])


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (80, 0), (85, -0.5), (90, -1), (100, -2), (500, -2)])
def test_overlong_penalty_is_linear_in_its_buffer(tokens, expected):
    assert overlong_penalty(tokens, OverlongRecipe(limit=100, buffer=20, penalty=2.0)) == pytest.approx(expected)
