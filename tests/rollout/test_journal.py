"""The buffer on disk after a killed process."""

import json

import pytest

from posttrain.rollout import journal as module
from posttrain.rollout.driver import EpisodeRequest
from posttrain.rollout.journal import EpisodeBuffer, remove_batches
from posttrain.rollout.store import episode_record, json_line
from tests.rollout.episodes import played

PLACES = [EpisodeRequest(seed, seed, 0, (0, "sampling", 3, seed, 0)) for seed in range(4)]


class Counting:
    """A rollout worker of which only `scores` is used."""

    scorer = None


@pytest.fixture
def asked(monkeypatch):
    """Which seeds were played, by a stand-in for the driver."""
    seeds = []

    def run_episodes(player, places, ended):
        for number, place in reversed(list(enumerate(places))):
            seeds.append(place.seed)
            ended(number, played(seed=place.seed, group=place.group, rewards=(0.1 * place.seed,)))

    monkeypatch.setattr(module, "run_episodes", run_episodes)
    return seeds


def lines(episodes):
    return [json_line(episode_record(episode)) for episode in episodes]


def test_a_complete_batch_is_read_instead_of_sampled(asked, tmp_path):
    with EpisodeBuffer(tmp_path, 3, keep_partial=False) as journal:
        first = journal.collect_episodes(Counting(), PLACES)
        journal.finish({"tasks": {"drawn": 4}})
    assert sorted(asked) == [0, 1, 2, 3]
    assert [episode.seed for episode in first] == [0, 1, 2, 3]
    with EpisodeBuffer(tmp_path, 3, keep_partial=False) as journal:
        assert journal.end is not None
        assert journal.end == {"tasks": {"drawn": 4}}
        assert lines(journal.collect_episodes(Counting(), PLACES)) == lines(first)
    assert len(asked) == 4


@pytest.mark.parametrize("cut", [1, 20, 10_000])
def test_a_partial_batch_is_restarted_or_continued_without_duplicate_episodes(cut, asked, tmp_path):
    with EpisodeBuffer(tmp_path, 3, keep_partial=False) as journal:
        first = journal.collect_episodes(Counting(), PLACES)
    file = tmp_path / "batch_000003.jsonl"
    whole = file.read_bytes()
    # The last line, of the episode of seed 0, is cut off.
    torn = whole[: max(len(whole) - cut, whole[:-1].rindex(b"\n") + 1)]
    file.write_bytes(torn)
    asked.clear()
    with EpisodeBuffer(tmp_path, 3, keep_partial=True) as journal:
        assert journal.end is None
        assert lines(journal.collect_episodes(Counting(), PLACES)) == lines(first)
        journal.finish({})
    assert asked == [0]
    held = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(record["episode"]["seed"] for record in held if "episode" in record) == [0, 1, 2, 3]

    file.write_bytes(torn)
    asked.clear()
    with EpisodeBuffer(tmp_path, 3, keep_partial=False) as journal:
        assert lines(journal.collect_episodes(Counting(), PLACES)) == lines(first)
    assert sorted(asked) == [0, 1, 2, 3]


def test_only_the_requested_batches_are_removed(asked, tmp_path):
    for step in (2, 3, 4, 10):
        with EpisodeBuffer(tmp_path, step, keep_partial=False) as journal:
            journal.collect_episodes(Counting(), PLACES[:1])
    remove_batches(tmp_path, 0, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch_000004.jsonl", "batch_000010.jsonl"]
    remove_batches(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["batch_000004.jsonl"]
