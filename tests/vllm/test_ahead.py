"""Rollouts ahead of the learner with vLLM: new weights while its answers are in flight."""

import json
import subprocess
import sys

import pytest

from posttrain.rollout.store import read_episodes
from tests.training import letters
from tests.vllm.asking import SMALL
from tests.vllm.interpreter import needs_vllm, vllm_python
from tests.vllm.models import save_model

pytestmark = needs_vllm


@pytest.mark.parametrize("rule", ["continue", "restart"])
def test_steps_of_rl_ahead_with_a_server(rule, tmp_path):
    model = save_model(tmp_path / "model")
    keys = [
        f"model.path={model}",
        f"environment.type={letters.__file__}",
        "environment.max_turns=3",
        f"runs={tmp_path}",
        "name=tiny",
        "steps=5",
        *(f"engine.{name}={value}" for name, value in (SMALL | {"python": vllm_python()}).items()),
        "rollout.ahead=2",
        f"rollout.on_new_weights={rule}",
        "rollout.tokens_per_episode=256",
        "rollout.tokens_per_turn=48",
        "rollout.groups_per_step=2",
        "rollout.episodes_per_group=4",
        "evaluation.every=2",
        "evaluation.seeds.count=2",
        "evaluation.final_seeds.count=2",
        "loss.correction.type=tis",
        "optimizer.learning_rate=1e-3",
        "learner.tokens_per_batch=512",
    ]
    command = [sys.executable, "-m", "posttrain.cli.main", "rl", *keys]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    run = tmp_path / "tiny"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    assert [line["policy/staleness_max"] <= 2 for line in steps] == [True] * 5
    overlapped = "rollout/restarted" if rule == "restart" else "policy/staleness_max"
    assert sum(line[overlapped] for line in steps) > 0
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [0, 2, 4, 5]
    for step in range(1, 6):
        for episode in read_episodes(run / "episodes" / f"step_{step:06d}.train.jsonl.zst").episodes:
            assert max(0, step - 3) <= episode.versions.min() <= episode.versions.max() <= step - 1
    assert list((run / "ahead").iterdir()) == []
