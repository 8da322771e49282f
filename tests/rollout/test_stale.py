"""How old episodes are, in updates."""

from posttrain.rollout.filters import staleness, token_staleness
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
