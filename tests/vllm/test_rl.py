"""`posttrain rl` with vLLM as its engine: two steps that change the weights, under the interpreter that trains."""

import json
import subprocess
import sys

import pytest

from tests.training import letters
from tests.vllm.asking import SMALL
from tests.vllm.interpreter import needs_vllm, vllm_python
from tests.vllm.models import save_model

pytestmark = [needs_vllm, pytest.mark.timeout(900)]


def test_two_steps_of_rl_with_servers(tmp_path):
    model = save_model(tmp_path / "model")
    engine = SMALL | {"python": vllm_python(), "bucket_megabytes": 1}
    keys = [
        f"model.path={model}",
        f"environment.type={letters.__file__}",
        "environment.max_turns=2",
        f"runs={tmp_path}",
        "name=tiny",
        "steps=2",
        *(f"engine.{name}={value}" for name, value in engine.items()),
        "rollout.tokens_per_episode=256",
        "rollout.tokens_per_turn=8",
        "rollout.groups_per_step=2",
        "rollout.episodes_per_group=4",
        "evaluation.seeds.count=2",
        "evaluation.final_seeds.count=2",
        "loss.correction.type=tis",
        "optimizer.learning_rate=1e-3",
        "learner.tokens_per_batch=512",
    ]
    command = [sys.executable, "-m", "posttrain.cli.main", "rl", *keys]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    assert len(steps) == 2
    for step in steps:
        assert step["tokens/sampled"] > 0
        assert step["tokens/reused"] > 0, "turns and groups share prompts"
        assert 0 < step["policy/mismatch"] < 1e-4
        assert step["optimizer/gradient_norm"] > 0
    assert (tmp_path / "tiny" / "logs" / "vllm-0.log").stat().st_size > 0
