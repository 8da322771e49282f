"""A run of rl on the letters task with vLLM as its engine, from the command line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.training import letters
from tests.vllm.asking import SMALL
from tests.vllm.interpreter import vllm_python
from tests.vllm.models import save_model


def trained(directory: Path, *keys: str, seconds: float) -> tuple[Path, list[dict[str, Any]]]:
    """The run in `directory` that `keys` ask for, and the lines of its metrics; a run that fails fails the test."""
    words = [
        f"model.path={save_model(directory / 'model')}",
        f"environment.type={letters.__file__}",
        f"runs={directory}",
        "name=tiny",
        *(f"engine.{name}={value}" for name, value in (SMALL | {"python": vllm_python()}).items()),
        "rollout.tokens_per_episode=256",
        "rollout.groups_per_step=2",
        "rollout.episodes_per_group=4",
        "evaluation.seeds.count=2",
        "evaluation.final_seeds.count=2",
        "loss.correction.weights=token",
        "optimizer.learning_rate=1e-3",
        "learner.tokens_per_batch=512",
        *keys,
    ]
    command = [sys.executable, "-m", "posttrain.cli.main", "rl", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    run = directory / "tiny"
    return run, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
