"""Ten thousand turns of agents in a training run: the stored episodes have the engine's tokens, bit for bit."""

import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import posttrain
from posttrain.rollout.store import Split

AGENT = Path(__file__).parent / "random_agent.py"


class Recording(posttrain.LocalEngine):
    """The local engine, which records every completion."""

    sampled: list = []

    async def generate(self, request, on_token=None):
        completion = await super().generate(request, on_token)
        self.sampled.append((request.prompt_ids, completion))
        return completion


def as_bits(prompt, ids, logprobs, versions):
    return tuple(prompt), tuple(ids), np.asarray(logprobs, np.float32).tobytes(), tuple(versions)


def recorded_turns(tiny_model, folder, calls, steps, groups):
    """Train with agents; returns the turns of the stored episodes and those of the engine, with their counts."""
    Recording.sampled = []
    result = posttrain.rl(
        model={"path": str(tiny_model)},
        runs=str(folder),
        environment={"type": "bandit", "format": {"prime": False}},
        agent={"command": f"{shlex.quote(sys.executable)} {shlex.quote(str(AGENT))} {calls}", "reward": "report"},
        rollout={"groups_per_step": groups, "episodes_per_group": 2, "tokens_per_turn": 6, "tokens_per_episode": 2048},
        evaluation={"every": 0, "start": False, "seeds": {"count": 1}, "final_seeds": {"count": 1}},
        steps=steps,
        engine=Recording,
    )
    stored = Counter()
    streams = 0
    for split in get_args(Split):
        for episode in result.episodes(split=split):
            assert episode.info["ending"] == "finished", episode.failure
            assert sum(int(stream.sampled.sum()) for stream in episode.streams) == sum(
                turn.stop - turn.start for turn in episode.turns
            )
            streams += len(episode.streams)
            for turn in episode.turns:
                stream, span = episode.streams[turn.stream], slice(turn.start, turn.stop)
                assert stream.sampled[span].all()
                known = stream.ids[: turn.start].tolist(), stream.ids[span].tolist()
                stored[as_bits(*known, stream.rollout_logprobs[span], stream.versions[span].tolist())] += 1
    engine = Counter(as_bits(prompt, one.ids, one.logprobs, one.versions) for prompt, one in Recording.sampled)
    return stored, engine, streams


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("calls", "steps", "groups", "least"), [(48, 2, 1, 192), pytest.param(250, 5, 4, 10_000, marks=pytest.mark.slow)]
)
def test_turns_of_agents_are_stored_as_they_were_sampled(calls, steps, groups, least, tiny_model, tmp_path):
    stored, engine, streams = recorded_turns(tiny_model, tmp_path, calls, steps, groups)
    assert stored == engine
    turns, tokens = stored.total(), sum(count * len(key[1]) for key, count in stored.items())
    assert len({key[3] for key in stored}) > 1, "the weights changed"
    print(f"{turns:,} turns in {streams:,} streams, {tokens:,} tokens: all equal what the engine sampled")
    assert turns >= least
