"""Launch a run on a Ray cluster. The launching process creates all workers, monitors them and restarts the learners."""

import os
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import uuid4

from rich.console import Console

from posttrain.distributed.launch import stop_signals_to
from posttrain.distributed.ray.actors import EngineWorker, EnvironmentWorker, RewardWorker
from posttrain.distributed.ray.connection import connected
from posttrain.distributed.ray.learner import INTERRUPTED, Job, LearnerExit, LearnerWorker
from posttrain.distributed.ray.models import CriticWorker, ReferenceWorker, rank_variables
from posttrain.distributed.ray.monitor import KILLED, WorkerMonitor, dead_machine, find_hangs
from posttrain.distributed.ray.worker_group import WorkerDied, WorkerHandle, unwrap_ray_error
from posttrain.errors import InputError, RunError
from posttrain.planning.workers import (
    CRITIC,
    ENGINE,
    ENVIRONMENTS,
    LEARNER,
    REFERENCE,
    REWARD,
    Worker,
    counted,
    living,
    place,
    placed_recipe,
    refuse_placement,
)
from posttrain.recipe.engines import LocalEngineRecipe
from posttrain.recipe.run import TrainedRecipe
from posttrain.recipe.stages import Recipe
from posttrain.runs.directory import RunDirectory
from posttrain.runs.tables import show_line

HANG_SECONDS = 600.0
"""Seconds without progress after which a worker that others wait for counts as hung. Longer than loading a model takes."""
MAX_RESTARTS = 8
"""Restarts of dead or hung workers in one run; one more failure stops the run."""
THREADS = 32
"""Number of environments that one worker steps concurrently."""
_PLACEMENT_SECONDS = 120.0
"""Maximum wait for the placement group, in seconds."""
_START_SECONDS = 120.0
"""Seconds after which a message says that learners have not started."""
_LOST_RANK_SECONDS = 15.0
"""Maximum seconds between the loss of the connection between learners and the report of which learner died."""


def launch(recipe: Recipe, resume: bool, overwrite: bool, console: Console) -> None:
    """Run the stage on the cluster at `recipe.hardware.ray` and wait for it.

    Raises the same errors as the stage in this process: InputError, RunError or KeyboardInterrupt. After Ctrl-C or
    SIGTERM, the learners save a checkpoint; a second signal ends the run at once.
    """
    placed = placed_recipe(recipe)
    refuse_placement(placed)
    assert placed.hardware.ray is not None
    with connected(placed.hardware.ray) as ray:
        run = ClusterRun(placed, resume, overwrite, console, ray)
        if run.gpus and isinstance(getattr(placed, "engine", None), LocalEngineRecipe):
            reason = "it is not chosen by device on a cluster; with engine.type=vllm, decoding uses CUDA graphs"
            show_line(console, f"engine.type is local: {reason}")
        try:
            run.run()
        finally:
            run.close()


class _DiedWhileStarting(RunError):
    """A process died before it returned from its first call."""


class ClusterRun:
    """One run on a cluster."""

    def __init__(self, recipe: TrainedRecipe, resume: bool, overwrite: bool, console: Console, ray: Any) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.recipe, self.console, self.ray = recipe, console, ray
        self.resume, self.overwrite = resume, overwrite
        self._plan()
        self.document = recipe.model_dump_json()
        whole = recipe.model.model_copy(update={"lora": None, "load_in_4bit": False, "gradient_checkpointing": False})
        self.reference_document = recipe.model_copy(update={"model": whole}).model_dump_json()
        self.heartbeat_seconds = min(1.0, HANG_SECONDS / 10)
        # Place the monitor on this machine, because it must outlive all workers.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        # Workers look up the monitor by name, because a handle among their arguments would have to outlive their
        # restarts.
        self.monitor_name = f"monitor-{uuid4().hex}"
        options = {"num_cpus": 0, "scheduling_strategy": here, "name": self.monitor_name}
        # It hears from all workers again within a heartbeat; what it has counted is lost.
        options |= {"max_restarts": -1, "max_task_retries": -1}
        self.monitor = ray.remote(WorkerMonitor).options(**options).remote(MAX_RESTARTS)
        self.actors: dict[str, Any] = {}
        self.handles: dict[str, list[WorkerHandle]] = {}
        """The workers that the learners call, by role."""
        self.critics: list[WorkerHandle] = []
        self.past_events: list[str] = []
        self._before = self._run_id()
        self._stop = 0
        self._learning = False
        """Whether the learners run a stage that can be stopped."""
        self._named: set[str] = set()
        self._past_machines = self._dead_machines()
        """Machines that were dead when the learners started."""
        self._monitor_unavailable = False
        """Whether the monitor did not respond to the last call."""
        self._group: Any = None

    # -- workers ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Start all workers, and restart the learners whenever one dies, until the stage has ended."""
        try:
            self._reserve()
            with stop_signals_to(self._forward_signal):
                self._start_learners()
                self._start_others()
                while (ended := self._wait_for_learners(self._start_stage())) is None:
                    self._restart_learners()
                self._raise_errors(ended)
        except Exception as error:
            if not isinstance(unwrap_ray_error(error), WorkerDied):
                raise
            # All deaths of workers are handled: this is that of the monitor, for good only with the daemon of its machine.
            raise RunError(
                "Ray's daemon on this machine died, and the run's workers with it; start Ray again, then continue with "
                f"{self._resume_command}"
            ) from error

    @property
    def _resume_command(self) -> str:
        return f"`posttrain {self.recipe.stage} --resume {self.recipe.runs}/{self.recipe.name}`"

    def close(self) -> None:
        """Kill all workers."""
        for actor in [*self.actors.values(), self.monitor]:
            self.ray.kill(actor)
        if self._group is not None:
            self.ray.util.remove_placement_group(self._group)

    def _plan(self) -> None:
        """Place the workers on the machines that Ray counts now."""
        self.nodes = living(self.ray.nodes())
        self.gpus = sum(node.devices for node in self.nodes)
        self.workers, _ = place(self.recipe, self.nodes)

    def _reserve(self) -> None:
        """Create the placement group, and plan again when machines join or leave.

        Ray counts a machine that died until it has missed heartbeats for half a minute, and a plan that needs it never fits.
        """
        ends = time.monotonic() + _PLACEMENT_SECONDS
        self._request_group()
        while not self._group.wait(1):
            if time.monotonic() > ends:
                raise RunError(
                    f"hardware: the cluster had no room for {counted(self.workers)} within {_PLACEMENT_SECONDS:.0f} s; wait "
                    "for other jobs to end, or request less"
                )
            if Counter(living(self.ray.nodes())) != Counter(self.nodes):
                self.ray.util.remove_placement_group(self._group)
                self._plan()
                self._request_group()

    def _request_group(self) -> None:
        """Request one bundle per worker; a colocated engine shares the bundle of its learners."""
        bundles: list[dict[str, float]] = []
        self.bundle_of: dict[str, int] = {}
        size = self.recipe.hardware.engines.devices
        hosts: dict[str, str] = {}
        for worker in self.workers:
            if worker.colocated:
                learners = range(worker.number * size, (worker.number + 1) * size)
                hosts |= {f"{LEARNER} {number}": worker.name for number in learners}
        for worker in self.workers:
            host = hosts.get(worker.name, worker.name)
            if host not in self.bundle_of:
                self.bundle_of[host] = len(bundles)
                bundles.append({"CPU": 0.0})
            self.bundle_of[worker.name] = self.bundle_of[host]
            bundle = bundles[self.bundle_of[host]]
            bundle["CPU"] = round(bundle["CPU"] + worker.cpus, 4)
            if worker.gpus:
                bundle["GPU"] = bundle.get("GPU", 0) + worker.gpus
        self._group = self.ray.util.placement_group(bundles, strategy="PACK")

    def _create_actor(self, kind: type, worker: Worker, first: tuple[Any, ...], restarts: int, **options: Any) -> Any:
        """Start an actor in the bundle of `worker`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        devices: tuple[int, ...] | None = None
        if worker.colocated:
            # The GPUs that Ray assigned to the learners of the engine.
            size = self.recipe.hardware.engines.devices
            hosts = range(worker.number * size, (worker.number + 1) * size)
            devices = tuple(device for host in hosts for device in self.locations[host][3])
        elif not worker.gpus:
            devices = ()  # Ray leaves all GPUs visible to an actor that requests none.
        options |= {"num_cpus": worker.cpus, "num_gpus": worker.gpus, "max_restarts": restarts}
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=self.bundle_of[worker.name]
        )
        common = (worker.name, self.monitor_name, self.heartbeat_seconds, os.getcwd(), devices)
        actor = self.ray.remote(kind).options(**options).remote(*first, *common)
        self.actors[worker.name] = actor
        return actor

    def _start_learners(self) -> None:
        self.learners = [
            self._create_actor(LearnerWorker, worker, (), 0) for worker in self.workers if worker.role == LEARNER
        ]
        self.locations = self._call_all("learners", "location", self.learners)
        # The state of the critic is in the run's checkpoints, so it starts and ends with the learners.
        self.critics = [
            (worker.name, self._create_actor(CriticWorker, worker, (self.document,), 0))
            for worker in self.workers
            if worker.role == CRITIC
        ]
        places = self._call_all("processes of the critic", "location", [actor for _, actor in self.critics])
        self.critic_nodes = {name: place[2] for (name, _), place in zip(self.critics, places, strict=True)}

    def _call_all(self, what: str, method: str, actors: list[Any]) -> list[Any]:
        calls = [getattr(actor, method).remote() for actor in actors]
        try:
            if calls and len(self.ray.wait(calls, num_returns=len(calls), timeout=_START_SECONDS)[0]) < len(calls):
                message = (
                    f"the {what} have not started: no machine of the cluster has room for them, or they start slowly"
                )
                show_line(self.console, message)
            return self.ray.get(calls)
        except Exception as error:
            cause = unwrap_ray_error(error)
            kind = _DiedWhileStarting if isinstance(cause, WorkerDied) else RunError
            raise kind(f"the {what} could not be started on the cluster: {cause}") from error

    def _start_others(self) -> None:
        kinds: dict[str, tuple[Any, ...]] = {
            ENGINE: (EngineWorker, self.document),
            REWARD: (RewardWorker, self.document),
            REFERENCE: (ReferenceWorker, self.reference_document),
            ENVIRONMENTS: (EnvironmentWorker,),
        }
        begun = {}
        for worker in self.workers:
            if worker.role in kinds:
                kind, *first = kinds[worker.role]
                options = {"max_concurrency": THREADS} if worker.role == ENVIRONMENTS else {}
                begun[worker] = self._create_actor(kind, worker, tuple(first), -1, **options)
        self.handles = {role: [] for role in kinds}
        for worker, actor in begun.items():
            try:
                self.ray.get(actor.get_pid.remote())
            except Exception as error:
                cause = unwrap_ray_error(error)
                kind = InputError if isinstance(cause, InputError) else RunError
                raise kind(f"{worker.name} could not be started: {cause}") from error
            self.handles[worker.role].append((worker.name, actor))

    # -- learning -----------------------------------------------------------------------------------------------------

    def _start_stage(self) -> list[Any]:
        """Start the stage on all learners; returns references to their results."""
        run_id = self._run_id()
        begun = run_id is not None and (self.resume or run_id != self._before)
        workers = self.handles | {CRITIC: self.critics}
        columns = {"COLUMNS": str(shutil.get_terminal_size((120, 24)).columns)}
        references = []
        variables = rank_variables(self.locations, self.gpus > 0)
        for rank, learner in enumerate(self.learners):
            events = tuple(self.past_events) if rank == 0 else ()
            resume, overwrite = self.resume or begun, self.overwrite and not begun
            job = Job(self.document, resume, overwrite, workers, columns | variables[rank], events)
            references.append(learner.run.remote(job))
        self.past_events, self._learning = [], True
        return references

    def _run_id(self) -> str | None:
        """The id of the run in the recipe's directory; None if there is no run."""
        path = Path(self.recipe.runs) / self.recipe.name
        try:
            return str(RunDirectory.open(path).load_environment()["id"])
        except InputError:
            return None

    def _wait_for_learners(self, references: list[Any]) -> list[LearnerExit] | None:
        """How the learners ended; None if a learner died, which is recorded and reported."""
        left, ends, since_lost = dict(enumerate(references)), {}, None
        while left:
            died: tuple[str, str, int] | None = None
            ready, _ = self.ray.wait(list(left.values()), num_returns=len(left), timeout=0.5)
            for rank in [rank for rank, reference in left.items() if reference in ready]:
                try:
                    ends[rank] = self.ray.get(left.pop(rank))
                except Exception as error:
                    cause = unwrap_ray_error(error)
                    if not isinstance(cause, WorkerDied):
                        raise cause from error
                    died = died or (f"{LEARNER} {rank}", self.locations[rank][2], self.locations[rank][4])
            for name, pid in (end.died for end in ends.values() if end.died is not None):
                died = died or (name, self.critic_nodes[name], pid)
            if died is not None:
                if self._stop:
                    return [LearnerExit(INTERRUPTED)]
                name, node, pid = died
                self._record_death(name, dead_machine(node) or KILLED, pid)
                return None
            lost = any(end.lost for end in ends.values())
            if lost or (left and any(end.code for end in ends.values())):
                since_lost = since_lost or time.monotonic()
                if time.monotonic() - since_lost > _LOST_RANK_SECONDS:
                    if not lost:
                        break
                    self._record_death(LEARNER, "processes lost each other", self.locations[0][4])
                    return None
            self._check_hangs()
        return [ends[rank] for rank in sorted(ends)]

    def _record_death(self, name: str, reason: str, pid: int) -> None:
        sentence, too_many = self.ray.get(self.monitor.record_death.remote(name, reason, pid))
        if too_many:
            raise RunError(
                f"{sentence}, after {MAX_RESTARTS} restarts of workers; find the cause, then continue with "
                f"{self._resume_command}"
            )
        # Events that an earlier learner logged after its last checkpoint are lost with it, so repeat them.
        earlier = self.ray.get(self.monitor.all_deaths.remote())[:-1]
        before = f" (before it: {'; '.join(earlier)})" if earlier else ""
        self.past_events.append(f"{sentence}; all learners continued from the last checkpoint{before}")
        show_line(self.console, f"{sentence}; all learners continue from the last checkpoint")

    def _restart_learners(self) -> None:
        """Kill the remaining learners and start all of them again, with the engines on their GPUs."""
        self._learning = False
        self._kill(LEARNER, CRITIC)
        # Wait until no earlier learner holds the lock of the run directory.
        path = Path(self.recipe.runs) / self.recipe.name
        ends = time.monotonic() + 60
        while path.is_dir() and time.monotonic() < ends:
            try:
                with RunDirectory(path).lock():
                    break
            except InputError:
                time.sleep(0.2)
        while True:
            try:
                self._start_learners()
                break
            except _DiedWhileStarting as error:
                self._kill(LEARNER, CRITIC)
                # A machine whose death Ray had not noticed yet explains one failure.
                lost = self._dead_machines() - self._past_machines
                self._past_machines |= lost
                if not lost:
                    self._record_death(LEARNER, f"died while it started ({error})", time.monotonic_ns())
        self._past_machines = self._dead_machines()
        if self.gpus and self.handles[ENGINE]:
            self._kill(*self.handles)
            self._start_others()

    def _dead_machines(self) -> set[str]:
        return {state["NodeID"] for state in self.ray.nodes() if not state["Alive"]}

    def _kill(self, *roles: str) -> None:
        """Kill the workers of these roles, which are replaced. These deaths are not counted."""
        names = [worker.name for worker in self.workers if worker.role in roles]
        self.ray.get(self.monitor.expect_deaths.remote(names))
        for name in names:
            if name in self.actors:
                self.ray.kill(self.actors[name])

    def _raise_errors(self, ended: list[LearnerExit]) -> None:
        """Raise the error of the stage, if there was one."""
        stopped = [end.message for end in ended if end.code == INTERRUPTED]
        if stopped:
            # The learner prints the message as well, but Ray may not relay the last lines of a process that ends.
            show_line(self.console, next(filter(None, stopped), "stopped"))
            raise KeyboardInterrupt
        for end in ended:
            if end.code and end.message:
                raise (InputError if end.code == InputError.exit_code else RunError)(end.message)
        if any(end.code for end in ended):
            raise RunError("a learner failed; see its output above")

    # -- hangs and signals --------------------------------------------------------------------------------------------

    def _check_hangs(self) -> None:
        try:
            statuses = self.ray.get(self.monitor.statuses.remote(), timeout=30)
        except Exception as error:
            if not self._monitor_unavailable:
                message = f"the worker monitor does not respond ({type(error).__name__}), so hangs are not detected"
                show_line(self.console, message)
            self._monitor_unavailable = True
            return
        self._monitor_unavailable = False
        for hang in find_hangs(statuses, HANG_SECONDS):
            if not hang.started:
                if hang.name not in self._named:
                    show_line(self.console, hang.sentence)
                    self._named.add(hang.name)
                continue
            show_line(self.console, f"{hang.sentence}; it is restarted")
            self.ray.get(self.monitor.set_reason.remote(hang.name, f"hung ({hang.sentence})"))
            self.ray.kill(self.actors[hang.name], no_restart=hang.name.startswith(LEARNER))

    def _forward_signal(self, number: int) -> None:
        """Stop the learners at a step boundary; a second signal, or one before they run, ends the run at once."""
        self._stop += 1
        if self._stop > 1 or not self._learning:
            raise KeyboardInterrupt
        names = [f"{LEARNER} {i}" for i in range(len(self.learners))]
        threading.Thread(target=lambda: self.monitor.stop.remote(names), daemon=True).start()
