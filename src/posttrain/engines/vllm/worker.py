"""Extension of vLLM's workers: receive weights from the trainer, and exit together with the process that started them.

vLLM mixes `WorkerExtension` into its worker class; its methods are called by name on every worker.
"""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from posttrain.engines.vllm.settings import BACKEND


def _parent_of(process: int) -> int | None:
    """Id of the parent of `process`; None if the system does not provide it."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


WeightTransferEngineFactory.register_engine(BACKEND, "posttrain.engines.vllm.receiver", "TrainerWeights")


class WorkerExtension:
    """What a worker does besides vLLM's own methods."""

    weight_transfer_engine: Any

    def end_with_parent(self, first: int) -> None:
        """Exit when the parent process is gone, even if it was killed. `first`: id of the process that started vLLM. If
        the parent is the scheduler between `first` and this process, it is killed as well when `first` is gone."""
        parent = os.getppid()
        between = parent != first and _parent_of(parent) == first

        def watch() -> None:
            while os.getppid() == parent and not (between and _parent_of(parent) != first):
                time.sleep(1.0)
            if os.getppid() == parent:
                os.kill(parent, signal.SIGKILL)
            os._exit(1)

        threading.Thread(target=watch, daemon=True, name="end with parent").start()

    def ping(self) -> None:
        """Return at once: shows that the worker responds."""

    def missing_weights(self) -> list[str]:
        """Names of parameters that the current update of weights has not completed."""
        return self.weight_transfer_engine.missing()
