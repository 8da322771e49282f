"""How old episodes are, and which are too old."""

import pytest

from posttrain.rollout.filters import drop_stale, staleness, token_staleness
from tests.rollout.episodes import played


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


@pytest.mark.parametrize(
    ("smallest", "kept", "too_small"),
    [(1, [(0, 1), (1, 0), (1, 1), (2, 0)], 0), (2, [(1, 0), (1, 1), (2, 0)], 1)],
)
def test_a_group_that_a_drop_makes_too_small_is_dropped(smallest, kept, too_small):
    episodes = [
        of_versions(0, 0, 4, 6),  # its first token is too old
        of_versions(0, 1, 6),
        of_versions(1, 0, 5),
        of_versions(1, 1, 6),
        of_versions(2, 0, 6),  # its neighbour failed, which is not staleness
    ]
    remaining, stale, left = drop_stale(episodes, 6, 1, smallest)
    assert [(e.group, e.index) for e in remaining] == kept
    assert (stale, left) == (1, too_small)
