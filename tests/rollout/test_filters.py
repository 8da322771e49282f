"""Filters on groups, the overlong penalty, and how old episodes are, in updates."""

import pytest

from posttrain.recipe.rollout import OverlongRecipe
from posttrain.rollout.filters import has_signal, most_uncertain, overlong_penalty, staleness, token_staleness

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


def of_versions(group: int, index: int, *versions: int):
    episode = played(group=group, index=index, tokens=len(versions), version=versions[0])
    (stream,) = episode.streams
    stream.versions = stream.versions.copy()
    stream.versions[stream.sampled] = versions
    return episode


def test_an_episode_is_as_old_as_its_oldest_token():
    assert staleness(of_versions(0, 0, 3, 5, 7), 9) == 6
    assert token_staleness([of_versions(0, 0, 3, 5), of_versions(0, 1, 9)], 9).tolist() == [6, 4, 0]
    assert token_staleness([], 9).tolist() == []
