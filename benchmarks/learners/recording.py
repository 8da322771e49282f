"""What both sides write down about their steps."""

import json
import math
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.timing import peak_memory


@dataclass
class Recorder:
    """Counts what passes through the learner and stamps the end of each optimizer step.

    A step lasts from the end of the one before it, so that everything a system does between two updates counts. The
    first `warmup` steps are dropped.
    """

    warmup: int
    steps: int
    file: Path
    extra_per_row: float = 0.0
    """Seconds of work done before the first step for each row, such as reference log-probabilities; added to steps."""
    dtype: str | None = None
    """Of the weights that compute."""
    tokens: int = 0
    rows: int = 0
    ends: list[dict[str, Any]] = field(default_factory=list)

    def saw(self, rows: int, tokens: int) -> None:
        """The learner takes `rows` rows with `tokens` real tokens, padding left out."""
        self.rows += rows
        self.tokens += tokens

    def finished_step(self, loss: float = math.nan) -> None:
        """An optimizer step is over; after the last one the result is written and the process ends."""
        now = {"at": time.perf_counter(), "processor": time.process_time()}
        self.ends.append(now | {"rows": self.rows, "tokens": self.tokens, "loss": loss})
        self.rows = self.tokens = 0
        if len(self.ends) == self.warmup + self.steps:
            self.write()
            sys.stdout.flush()
            # What comes after the last step (checkpoint, export, plots) is not measured, so it is not waited for.
            os._exit(0)

    def write(self) -> None:
        first, measured = self.ends[self.warmup - 1], self.ends[self.warmup :]
        rows, tokens = (sum(end[key] for end in measured) for key in ("rows", "tokens"))
        losses = [end["loss"] for end in self.ends if math.isfinite(end["loss"])]
        seconds = measured[-1]["at"] - first["at"] + self.extra_per_row * rows
        result = {
            "seconds": seconds,
            "processor": measured[-1]["processor"] - first["processor"],
            "rows": rows,
            "tokens": tokens,
            "loss": sum(losses) / len(losses) if losses else None,
            "peak_memory": peak_memory(),
            "dtype": self.dtype,
        }
        self.file.write_text(json.dumps(result))
