"""The side of posttrain under the profiler of torch: what the operators of its measured steps took."""

import json
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from learners.posttrain_side import main
from learners.recording import Recorder


@dataclass
class ProfilingRecorder(Recorder):
    """Profiles the measured steps and writes the seconds of each operator instead of the speed.

    An operator's seconds are those of its own, without the operators that it calls; they are those of the thread that
    called it, so on several threads they are wall-clock time as well.
    """

    profiler: Any = field(default=None)
    begun: float = 0.0

    def finished_step(self, loss: float = float("nan")) -> None:
        from torch.profiler import ProfilerActivity, profile

        self.ends.append({})
        if len(self.ends) == self.warmup:
            self.profiler = profile(activities=[ProfilerActivity.CPU])
            self.profiler.__enter__()
            self.begun = time.perf_counter()
        if len(self.ends) == self.warmup + self.steps:
            seconds = time.perf_counter() - self.begun
            self.profiler.__exit__(None, None, None)
            averages = self.profiler.key_averages()
            operators = {event.key: event.self_cpu_time_total / 1e6 for event in averages}
            self.file.write_text(json.dumps({"seconds": seconds, "operators": operators, "tokens": self.tokens}))
            sys.stdout.flush()
            os._exit(0)


if __name__ == "__main__":
    main(ProfilingRecorder)
