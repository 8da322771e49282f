"""Whole runs of the command line, in processes of their own, read from their metrics."""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from accelerator.rows import Row

STEPS = 5
SHORT = [
    *("environment.type=bandit", "rollout.groups_per_step=4", "rollout.episodes_per_group=4", f"steps={STEPS}"),
    *("evaluation.every=0", "evaluation.seeds.count=4", "evaluation.final_seeds.count=4", "plots=false"),
]


def reinforcement_run(model: str, engine: list[str], device: str, budget: float) -> Iterator[Row]:
    """A short run of `rl` with LoRA: the largest mismatch of its steps, seconds of a step, and of the last against the second.

    A mismatch is the mean distance of the engine's log-probabilities from the learner's, in nats per token.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = ["rl", f"model.path={model}", f"model.device={device}", "model.lora.rank=16", *engine, *SHORT]
        command = [sys.executable, "-m", "posttrain.cli.main", *words, f"runs={folder}", "name=short"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=budget, check=False)
        if done.returncode:
            raise RuntimeError(done.stdout.decode().strip().splitlines()[-1])
        text = (Path(folder) / "short" / "metrics.jsonl").read_text(encoding="utf-8")
    steps = [line for line in map(json.loads, text.splitlines()) if line["kind"] == "train"]
    mismatch = [step["policy/mismatch"] for step in steps if "policy/mismatch" in step]
    yield Row("run", f"{len(steps)} steps of rl, largest mismatch", max(mismatch), "nats", note=" ".join(engine))
    yield Row("run", "median step", statistics.median(step["time/step"] for step in steps), "s")
