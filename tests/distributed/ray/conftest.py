"""One Ray cluster on this machine for all tests of this folder, and what a test needs to kill its workers."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from posttrain.distributed.ray.connection import OWNED
from posttrain.models.reward import RewardModel
from posttrain.recipe.model import ModelRecipe

CORES = 2
"""Of the first machine of the cluster."""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A cluster whose machines are processes here; skipped without ray."""
    pytest.importorskip("ray", reason="needs the package ray: pip install 'posttrain[ray]'")
    # Ray's workers are nice by default, and starve on a machine that is busy with tests.
    os.environ |= {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    import ray
    from ray.cluster_utils import Cluster

    folder = f"/tmp/pt-ray-{os.getpid()}"
    # Ray notes the address of the newest cluster there, and does not make the folder itself.
    Path("/tmp/ray").mkdir(exist_ok=True)
    made = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": CORES,
            "include_dashboard": False,
            "object_store_memory": 100 * 2**20,
            # Runs of other tests start clusters of their own beside this one.
            "resources": {OWNED: 1},
            "temp_dir": folder,
        },
    )
    ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def paid(tiny_model, tmp_path_factory):
    """Keys of a run with a reward model."""
    directory = tmp_path_factory.mktemp("reward") / "model"
    RewardModel(ModelRecipe(path=str(tiny_model)), seed=11).export(directory)
    return {"reward": {"path": str(directory), "normalize": "none"}}


class Disturber:
    """Kills workers of a run by their process ids, each once the run has come to a step."""

    def __init__(self, launched, folder: Path) -> None:
        self.launched, self.folder = launched, folder

    def finished(self) -> int:
        """Steps in the metrics so far; -1 before the run directory is there."""
        file = self.folder / "metrics.jsonl"
        return file.read_text().count('"kind": "train"') if file.exists() else -1

    def until(self, step: int) -> None:
        while self.finished() < step:
            time.sleep(0.02)

    def pid(self, name: str, not_pid: int = 0) -> int:
        """The process of a worker, once it reports."""
        ray = self.launched.ray
        while True:
            known = ray.get(self.launched.monitor.statuses.remote())
            if name in known and known[name].heartbeat.pid != not_pid:
                return known[name].heartbeat.pid
            time.sleep(0.05)

    def node(self, name: str) -> str:
        """Ray's id of the machine of a worker."""
        self.pid(name)
        return self.launched.ray.get(self.launched.monitor.statuses.remote())[name].heartbeat.node

    def signal(self, name: str, number: int = signal.SIGKILL) -> int:
        pid = self.pid(name)
        os.kill(pid, number)
        return pid
