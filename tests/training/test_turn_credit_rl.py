"""Whole RL runs with turn rewards on the tiny model: turn-level credit runs, and its credit is that of the turns."""

from pathlib import Path

import numpy as np
import pytest

from posttrain.credit.turns import state_keys
from posttrain.rollout.store import read_episodes

from . import small
from .small import lines


def train(tiny, runs, **changes):
    """Two steps on the task of rooms with turn rewards; returns the run, its last episodes and their credit."""
    values = small.recipe_values(tiny, runs, steps=2, kl={"coefficient": 0.0}, entropy={"coefficient": 0.0})
    values["environment"] = {"type": f"{Path(__file__).parent / 'rooms.py'}", "max_turns": 4}
    values["rollout"] = {"groups_per_step": 2, "episodes_per_group": 4, "tokens_per_turn": 5, "tokens_per_episode": 700}
    values |= {"learner": {"tokens_per_batch": 2500}, "checkpoint": {"every": 2}}
    run, _ = small.train(values | changes, overwrite=True)
    stored = read_episodes(run.episodes / "step_000002.train.jsonl.zst")
    assert [line["step"] for line in lines(run, "train")] == [1, 2]
    assert stored.advantages is not None
    return run, stored.episodes, stored.advantages


CREDITS = [{"type": "turn_returns", "discount": 0.9}, {"type": "mt_grpo"}, {"type": "gigpo"}]
CREDITS.append({"type": "gigpo", "divide_by_std": False, "step_weight": 0.5})


@pytest.mark.parametrize("credit", CREDITS, ids=str)
def test_credit_is_the_same_within_a_turn_and_differs_between_turns(tiny_model, tmp_path, credit):
    _, stored, found = train(tiny_model, tmp_path, credit=credit)
    assert len({len(episode.turns) for episode in stored}) > 1  # episodes of different numbers of turns
    differing = 0
    for episode, streams in zip(stored, found.values, strict=True):
        of_turns = [streams[turn.stream][turn.start : turn.stop] for turn in episode.turns]
        assert all(len(set(own.tolist())) == 1 for own in of_turns)
        differing += len({own[0] for own in of_turns}) > 1
        for stream, advantages in zip(episode.streams, streams, strict=True):
            assert not advantages[~stream.sampled].any()
    assert differing > 0


def test_gigpo_compares_turns_in_the_same_room_for_any_path(tiny_model, tmp_path):
    credit = {"type": "gigpo", "discount": 1.0, "divide_by_std": False, "step_weight": 1.0}
    _, stored, found = train(tiny_model, tmp_path, credit=credit)
    group = stored[0].group
    own = [i for i, episode in enumerate(stored) if episode.group == group]
    totals = {i: stored[i].total_reward for i in own}
    rooms: dict = {}
    for i in own:
        assert [turn.state for turn in stored[i].turns] == [key[1] for key in state_keys(stored[i])]
        for k, turn in enumerate(stored[i].turns):
            to_come = sum(t.reward for t in stored[i].turns[k:])
            rooms.setdefault(turn.state, []).append((i, turn, to_come))
    assert max(len(visits) for visits in rooms.values()) > len(own)  # also at different turns
    for visits in rooms.values():
        mean = np.mean([to_come for _, _, to_come in visits])
        for i, turn, to_come in visits:
            expected = totals[i] - np.mean(list(totals.values())) + to_come - mean
            assert found.values[i][turn.stream][turn.start] == pytest.approx(expected, abs=1e-5)


def test_bilevel_gae_trains_with_a_critic(tiny_model, tmp_path):
    run, stored, found = train(tiny_model, tmp_path, credit={"type": "bilevel_gae"})
    credited = np.concatenate(
        [v[s.sampled] for e, own in zip(stored, found.values, strict=True) for s, v in zip(e.streams, own, strict=True)]
    )
    assert credited.mean() == pytest.approx(0, abs=1e-5)  # whitened
    assert credited.std() == pytest.approx(1, abs=1e-3)
    assert np.isfinite(lines(run, "train")[-1]["critic/loss"])
