"""One part of posttrain by its public functions, for a number of seconds after its first step."""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import posttrain

COMMON = {"name": "run", "seed": 0, "steps": 100_000, "checkpoint": {"every": 1_000_000}}


class Stopwatch(posttrain.Callback):
    """Counts tokens after the first step and ends the process when the time is over."""

    def __init__(self, seconds: float, file: Path) -> None:
        self.seconds, self.file = seconds, file
        self.begun: float | None = None
        self.tokens = self.sampled = 0
        self.processor = self.rollout = 0.0

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        if self.begun is None:
            self.begun, self.processor = now, time.process_time()
            return
        self.tokens += int(metrics["tokens/trained"])
        self.sampled += int(metrics.get("tokens/sampled", 0))
        self.rollout += metrics.get("time/rollout", 0.0)
        if now - self.begun < self.seconds:
            return
        import torch

        result = {
            "tokens/s": self.tokens / (now - self.begun),
            "per processor second": self.tokens / (time.process_time() - self.processor),
            "threads": torch.get_num_threads(),
        }
        if self.rollout:
            result["sampled/s"] = self.sampled / self.rollout
        self.file.write_text(json.dumps(result))
        sys.stdout.flush()
        os._exit(0)


def main() -> None:
    """Run the job of the file in the first argument; the result goes to the second."""
    job = json.loads(Path(sys.argv[1]).read_text())
    watch = Stopwatch(job["seconds"], Path(sys.argv[2]))
    common = COMMON | {"runs": job["place"], "model": {"path": job["model"], "device": "cpu"}}
    if job["part"] == "sft":
        data = {"train": job["rows"], "cache": f"{job['place']}/tokens"}
        posttrain.sft(common, data=data, rows_per_update=8, evaluation={"every": 0}, callbacks=[watch])
        return
    posttrain.rl(
        common,
        environment={"type": "text_task", "prompts": job["rows"]},
        reward=lambda answer: sum(map(str.isalpha, answer)) / max(1, len(answer)),
        rollout={"groups_per_step": 4, "episodes_per_group": 4, "tokens_per_turn": 32},
        seeds={"start": 0, "count": 390},
        evaluation={"every": 0, "seeds": {"start": 390, "count": 1}, "final_seeds": {"start": 391, "count": 1}},
        callbacks=[watch],
    )


if __name__ == "__main__":
    main()
