"""Runs on a Ray cluster of eight machines, which are processes here, whose first learner kills a worker or a machine."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from harness.table import read_lines
from posttrain.distributed.ray.learner import Job, LearnerExit, LearnerWorker
from posttrain.errors import PosttrainError

MACHINES = 8
"""The first has no cores for workers: it has the launching process, which two learners, two engines and two processes of
environments on a machine each leave a spare one."""
LAYOUT = {"processes": 2, "engines": {"count": 2}, "environments": {"count": 2}}
MEMORY = 100 * 2**20
"""Bytes of a machine's object store."""
SECONDS = 900
"""After so long, a run counts as hung."""
PLAN, MARKS = "kill.json", "marks.jsonl"
"""Files beside a run: what is killed in which phases, and what happened when."""
CALLS = 9
"""The call in which a phase of many calls comes."""


class MarkedLearner(LearnerWorker):
    """A learner that writes down when steps end and when each phase begins, and kills there what the plan names.

    The first phase comes in step 2, the next in step 4, and so on, each once in a run.
    """

    def run(self, job: Job) -> LearnerExit:
        self.folder = Path(json.loads(job.document)["runs"])
        if job.variables.get("RANK", "0") != "0":
            return super().run(job)
        from tests.training.small import before_calls

        self.plan = json.loads((self.folder / PLAN).read_text())
        self.marked = {mark["what"] for mark in marks(self.folder)}
        for number, (phase, function) in enumerate(self.plan["phases"].items()):
            before_calls(function, partial(self._begin, number, phase, count(1)))
        before_calls("posttrain.runs.metrics:MetricsLog.write", self._logged)
        mark(self.folder, "start")
        return super().run(job)

    def _logged(self, log: Any, step: int, kind: str, values: Any) -> None:
        if kind == "train":
            mark(self.folder, "step", number=step)

    def _begin(self, number: int, phase: str, calls: Iterator[int], *args: Any) -> None:
        if phase in self.marked or progress(self.folder / "small")[0] <= 2 * number:
            return
        if phase == "rollout" and next(calls) < CALLS:
            return
        self.marked.add(phase)
        pid = self._pid(self.plan["kill"]) if self.plan["kill"] else None
        step, saved = progress(self.folder / "small")
        mark(self.folder, phase, step=step, saved=saved)
        if pid:
            os.kill(pid, signal.SIGKILL)

    def _pid(self, kill: str) -> int:
        """The process of a worker, or Ray's daemon on the machine of one or on the first machine."""
        import ray

        _, _, name = kill.rpartition("raylet of ")
        if name == "head":
            return self.plan["head"]
        worker = ray.get(self.heartbeat.monitor.statuses.remote())[name].heartbeat.pid
        if name == kill:
            return worker
        raylet = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
        assert "raylet" in Path(f"/proc/{raylet}/cmdline").read_text()
        return raylet


def mark(folder: Path, what: str, **more: int) -> None:
    """Write down what happens now."""
    with (folder / MARKS).open("a") as file:
        file.write(json.dumps({"what": what, "time": time.time()} | more) + "\n")


def marks(folder: Path) -> list[dict[str, Any]]:
    """What was written down, in order."""
    return read_lines(folder / MARKS) if (folder / MARKS).exists() else []


def progress(run: Path) -> tuple[int, int]:
    """The last finished step of a run, and the last one with a checkpoint."""
    from tests.training import small

    steps = [line["step"] for line in small.metrics(run) if line["kind"] == "train"]
    return max(steps, default=0), max((int(p.name[5:]) for p in run.glob("checkpoints/step_*")), default=0)


class Machines:
    """The cluster. Each machine is a daemon of Ray with its workers."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        root = Path(__file__).parents[2]
        os.environ |= {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        os.environ |= {
            "POSTTRAIN_PLOTS": "0",
            "PYTHONPATH": f"{root}:{root / 'benchmarks'}",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self.folder = Path(f"/tmp/pt-kills-{os.getpid()}")  # paths of sockets are short
        Path("/tmp/ray").mkdir(exist_ok=True)
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": MEMORY, "temp_dir": str(self.folder)}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)

    def close(self) -> None:
        self.cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)

    def fill(self) -> None:
        """Replace the machines that are gone."""
        for node in [node for node in self.cluster.worker_nodes if not _lives(node)]:
            self.cluster.remove_node(node, allow_graceful=False)
        while len(self.cluster.worker_nodes) < MACHINES - 1:
            self.cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
        self.cluster.wait_for_nodes()

    @property
    def head(self) -> int:
        """The daemon of the first machine."""
        return self.cluster.head_node.all_processes["raylet"][0].process.pid

    def run(self, values: dict[str, Any], folder: Path, phases: dict[str, str], kill: str | None, resume: bool) -> int:
        """Run with the log in `folder`; returns the exit code. `kill`: what is killed in each phase."""
        self.fill()
        (folder / PLAN).write_text(json.dumps({"phases": phases, "kill": kill, "head": self.head}))
        values = values | {"hardware": {"ray": self.cluster.address} | LAYOUT}
        mark(folder, "launch")
        process = multiprocessing.get_context("spawn").Process(target=_launch, args=(values, folder, resume))
        process.start()
        ends = time.monotonic() + SECONDS
        while process.is_alive() and time.monotonic() < ends:
            process.join(1)
            if _lives(self.cluster.head_node):
                self.fill()
        process.kill()
        process.join()
        return process.exitcode or 0


def _lives(node: Any) -> bool:
    return all(one.process.poll() is None for one in node.all_processes["raylet"])


def _launch(values: dict[str, Any], folder: Path, resume: bool) -> None:
    log = open(folder / "log.txt", "a")  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    from pydantic import TypeAdapter
    from rich.console import Console

    from posttrain.distributed.ray import launch
    from posttrain.planning import workers
    from posttrain.recipe.stages import Recipe

    launch.LearnerWorker = MarkedLearner  # type: ignore[misc]
    workers.CORES[workers.ENVIRONMENTS] = 1.0  # a machine of its own
    try:
        launch.launch(TypeAdapter(Recipe).validate_python(values), resume, False, Console(width=1000))
    except PosttrainError as error:
        print(f"error: {error}", flush=True)
        os._exit(error.exit_code)
