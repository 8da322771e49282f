"""The side of posttrain watched by py-spy: where Python was in its measured steps."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from learners.posttrain_side import main
from learners.recording import Recorder


@dataclass
class SpyingRecorder(Recorder):
    """Lets py-spy sample the stacks of this process during the measured steps."""

    spy: Any = field(default=None)

    def finished_step(self, loss: float = float("nan")) -> None:
        self.ends.append({})
        raw = self.file.with_suffix(".raw")
        if len(self.ends) == self.warmup:
            command = ["py-spy", "record", "--pid", str(os.getpid()), "--format", "raw", "--output", str(raw)]
            self.spy = subprocess.Popen([*command, "--rate", "100", "--nonblocking", "--idle"])
        if len(self.ends) == self.warmup + self.steps:
            self.spy.send_signal(signal.SIGINT)
            self.spy.wait()
            self.file.write_text(json.dumps({"samples": raw.read_text()}))
            sys.stdout.flush()
            os._exit(0)


if __name__ == "__main__":
    main(SpyingRecorder)
