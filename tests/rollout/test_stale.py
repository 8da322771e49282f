"""How old episodes are, and which are too old."""

import numpy as np
import pytest

from posttrain.rollout.filters import age, ages, drop_stale
from tests.rollout.episodes import played


def of_versions(group: int, index: int, *versions: int):
    episode = played(group=group, index=index, tokens=len(versions), version=versions[0])
    (stream,) = episode.streams
    stream.versions = stream.versions.copy()
    stream.versions[stream.sampled] = versions
    return episode


def test_an_episode_is_as_old_as_its_oldest_token():
    assert age(of_versions(0, 0, 3, 5, 7), 9) == 6
    assert ages([of_versions(0, 0, 3, 5), of_versions(0, 1, 9)], 9).tolist() == [6, 4, 0]
    assert ages([], 9).tolist() == []


@pytest.mark.parametrize(
    ("smallest", "kept", "alone"),
    [(1, [(0, 1), (1, 0), (1, 1), (2, 0)], 0), (2, [(1, 0), (1, 1), (2, 0)], 1)],
)
def test_what_is_left_alone_by_a_drop_goes_too_where_groups_are_compared(smallest, kept, alone):
    episodes = [
        of_versions(0, 0, 4, 6),  # too old by its first token
        of_versions(0, 1, 6),
        of_versions(1, 0, 5),
        of_versions(1, 1, 6),
        of_versions(2, 0, 6),  # alone since its neighbour failed: staleness has no part in it
    ]
    found, stale, left = drop_stale(episodes, 6, 1, smallest)
    assert [(e.group, e.index) for e in found] == kept
    assert (stale, left) == (1, alone)


def test_files_of_before_tokens_had_versions_give_them_that_of_the_episode():
    from posttrain.rollout.store import episode_of, episode_record

    record = episode_record(of_versions(0, 0, 7, 7))
    for stream in record["streams"]:
        del stream["versions"]
    (stream,) = episode_of(record).streams
    assert stream.versions.tolist() == np.where(stream.sampled, 7, -1).tolist()
