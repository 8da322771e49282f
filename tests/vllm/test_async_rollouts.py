"""Rollouts ahead of the learner with vLLM: new weights while its answers are in flight."""

import pytest

from posttrain.rollout.store import read_episodes
from tests.vllm.interpreter import needs_vllm
from tests.vllm.trained import trained

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def test_asynchronous_steps_of_rl_with_a_server(tmp_path):
    run, lines = trained(
        tmp_path,
        "environment.max_turns=3",
        "steps=5",
        "rollout.async_rollouts=2",
        "rollout.on_new_weights=continue",
        "rollout.tokens_per_turn=48",
        "evaluation.every=2",
        seconds=800,
    )
    steps = [line for line in lines if line["kind"] == "train"]
    assert [line["policy/staleness_max"] <= 2 for line in steps] == [True] * 5
    assert sum(line["policy/staleness_max"] for line in steps) > 0
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [0, 2, 4, 5]
    for step in range(1, 6):
        for episode in read_episodes(run / "episodes" / f"step_{step:06d}.train.jsonl.zst").episodes:
            assert max(0, step - 3) <= episode.versions.min() <= episode.versions.max() <= step - 1
    assert list((run / "async_rollouts").iterdir()) == []
