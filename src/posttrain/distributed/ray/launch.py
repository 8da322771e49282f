"""Starting a run on a Ray cluster, and keeping it going: the launching process makes all workers and watches them."""

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from rich.console import Console

from posttrain.distributed.launch import stop_signals_to
from posttrain.distributed.ray.actors import EngineWorker, EnvironmentWorker, RewardWorker
from posttrain.distributed.ray.connection import connected
from posttrain.distributed.ray.learner import INTERRUPTED, Ended, Job, LearnerWorker, WorkerGroup
from posttrain.distributed.ray.watch import KILLED, Watch, gone_machine, hangs
from posttrain.distributed.ray.worker_group import Gone, WorkerHandle, translated
from posttrain.errors import InputError, RunError
from posttrain.planning.workers import (
    ENGINE,
    ENVIRONMENTS,
    LEARNER,
    REWARD,
    PlacedRecipe,
    Worker,
    counted,
    living,
    place,
    placed_recipe,
)
from posttrain.recipe.stages import Recipe, RlRecipe
from posttrain.runs.directory import RunDirectory

THREADS = 32
"""Environments that one worker steps at a time."""
_PLACE_SECONDS = 120.0
"""Longest wait for the room that a plan found."""
_LOST_SECONDS = 15.0
"""How long after a learner has lost another one it may take until it is known which."""


def launch(recipe: Recipe, resume: bool, overwrite: bool, console: Console) -> None:
    """Run the stage on the cluster at `recipe.hardware.ray`, and wait for it.

    Raises InputError, RunError and KeyboardInterrupt as the stage in this process would. Ctrl-C and SIGTERM let the
    learners save a checkpoint; a second one does not wait for that.
    """
    placed = placed_recipe(recipe)
    _check(placed)
    assert placed.hardware.ray is not None
    with connected(placed.hardware.ray, placed.hardware) as ray:
        launched = Launch(placed, resume, overwrite, console, ray)
        try:
            launched.run()
        finally:
            launched.close()


def _check(recipe: PlacedRecipe) -> None:
    apart = recipe.hardware.dedicated
    if apart.critic or apart.reference:
        raise InputError(
            "hardware.dedicated is for `posttrain cluster plan`: in a run the learners' processes hold critic and reference "
            "model; remove it, or set both numbers to 0"
        )
    if isinstance(recipe, RlRecipe) and recipe.rollout.async_rollouts and recipe.rollout.on_new_weights != "finish":
        raise InputError(
            f"rollout.on_new_weights: {recipe.rollout.on_new_weights} changes the weights of an engine while it answers, which "
            "engines of a Ray cluster do not; set `finish`, or hardware.engines.count=0"
        )
    if isinstance(recipe, RlRecipe) and recipe.unit_credit is not None and recipe.hardware.rewards.count:
        raise InputError(
            "hardware.rewards: `unit_credit` asks the reward model in the learner's process itself; set "
            "hardware.rewards.count=0"
        )


class Launch:
    """One run on a cluster."""

    def __init__(self, recipe: PlacedRecipe, resume: bool, overwrite: bool, console: Console, ray: Any) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.recipe, self.console, self.ray = recipe, console, ray
        self.resume, self.overwrite = resume, overwrite
        self.nodes, _ = living(ray.nodes())
        self.gpus = sum(node.devices for node in self.nodes)
        self.workers, self.share = place(recipe, self.nodes)
        self.document = recipe.model_dump_json()
        hardware = recipe.hardware
        self.beat = min(1.0, hardware.hang_timeout / 10)
        # On this machine: the watch has to outlive all others.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        # Workers look it up by name: an actor's handle among the arguments would have to outlive what they are made from.
        self.watch_name = f"watch-{uuid4().hex}"
        options = {"num_cpus": 0, "scheduling_strategy": here, "name": self.watch_name}
        self.watch = ray.remote(Watch).options(**options).remote(hardware.max_restarts)
        self.actors: dict[str, Any] = {}
        self.seats: dict[str, list[WorkerHandle]] = {ENGINE: [], REWARD: [], ENVIRONMENTS: []}
        self.told: list[str] = []
        self._before = self._run_id()
        self._stop = 0
        self._learning = False
        """Whether the learners have a stage that they can stop."""
        self._named: set[str] = set()
        self._blind = False
        """The watch did not answer when it was last asked."""
        self._group: Any = None

    # -- workers ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Start everybody, and the learners again whenever one dies, until the stage has ended."""
        self._take_room()
        with stop_signals_to(self._hand_on):
            self._start_learners()
            self._start_others()
            while True:
                ended = self._ended(self._begin_learning())
                if ended is None:
                    self._restart_learners()
                    continue
                return self._conclude(ended)

    def close(self) -> None:
        """End all workers."""
        for actor in [*self.actors.values(), self.watch]:
            self.ray.kill(actor)
        if self._group is not None:
            self.ray.util.remove_placement_group(self._group)

    def _take_room(self) -> None:
        """Reserve what the workers need: a bundle for each, and one for an engine together with its learners."""
        self.bundles: list[dict[str, float]] = []
        self.bundle_of: dict[str, int] = {}
        size = self.recipe.hardware.engines.devices
        hosted: dict[str, int] = {}
        for worker in self.workers:
            if worker.colocated:
                for number in range(worker.number * size, (worker.number + 1) * size):
                    hosted[f"{LEARNER} {number}"] = worker.number
                hosted[worker.name] = worker.number
        shared: dict[int, int] = {}
        for worker in self.workers:
            host = hosted.get(worker.name)
            if host is not None and host in shared:
                index = shared[host]
            else:
                index = len(self.bundles)
                self.bundles.append({"CPU": 0.0})
                if host is not None:
                    shared[host] = index
            bundle = self.bundles[index]
            bundle["CPU"] = round(bundle["CPU"] + worker.cpus, 4)
            if worker.gpus:
                bundle["GPU"] = bundle.get("GPU", 0) + worker.gpus
            self.bundle_of[worker.name] = index
        self._group = self.ray.util.placement_group(self.bundles, strategy="PACK")
        if not self._group.wait(_PLACE_SECONDS):
            raise RunError(
                f"hardware: the cluster had no room for {counted(self.workers)} within {_PLACE_SECONDS:.0f} s; other jobs hold "
                "it, so wait for them, or ask for less"
            )

    def _made(self, kind: type, worker: Worker, first: tuple[Any, ...], restarts: int, **options: Any) -> Any:
        """An actor in the room of `worker`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        devices: tuple[int, ...] | None = None
        if worker.colocated:
            devices = self._devices_of(worker)
        room = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self.bundle_of[worker.name])
        actor = (
            self.ray.remote(kind)
            .options(
                num_cpus=worker.cpus,
                num_gpus=worker.gpus,
                max_restarts=restarts,
                scheduling_strategy=room,
                **options,
            )
            .remote(*first, worker.name, self.watch_name, self.beat, os.getcwd(), devices)
        )
        self.actors[worker.name] = actor
        return actor

    def _devices_of(self, engine: Worker) -> tuple[int, ...]:
        """The GPUs that the learners beside a colocated engine got from Ray."""
        size = self.recipe.hardware.engines.devices
        hosts = range(engine.number * size, (engine.number + 1) * size)
        return tuple(device for i in hosts for device in self.places[i][3])

    def _start_learners(self) -> None:
        self.learners = [self._made(LearnerWorker, worker, (), 0) for worker in self.workers if worker.role == LEARNER]
        self.places = self._asked_of_all("place")

    def _asked_of_all(self, method: str) -> list[Any]:
        try:
            return self.ray.get([getattr(learner, method).remote() for learner in self.learners])
        except Exception as error:
            raise RunError(f"the learners could not be started on the cluster: {translated(error)}") from error

    def _start_others(self) -> None:
        kinds: dict[str, tuple[type, tuple[Any, ...], dict[str, Any]]] = {
            ENGINE: (EngineWorker, (self.document,), {}),
            REWARD: (RewardWorker, (self.document,), {}),
            ENVIRONMENTS: (EnvironmentWorker, (), {"max_concurrency": THREADS}),
        }
        begun = {
            worker: self._made(kinds[worker.role][0], worker, kinds[worker.role][1], -1, **kinds[worker.role][2])
            for worker in self.workers
            if worker.role in kinds
        }
        self.seats = {role: [] for role in kinds}
        for worker, actor in begun.items():
            try:
                self.ray.get(actor.about.remote())
                self.seats[worker.role].append(WorkerHandle(worker.name, actor))
            except Exception as error:
                said = translated(error)
                kind_of = InputError if isinstance(said, InputError) else RunError
                raise kind_of(f"{worker.name} could not be started: {said}") from error

    # -- learning -----------------------------------------------------------------------------------------------------

    def _begin_learning(self) -> list[Any]:
        """Set the learners to work; returns what stands for their ends."""
        own = self._run_id()
        begun = own is not None and (self.resume or own != self._before)
        (address, port, *_), count = self.places[0], len(self.learners)
        locals_: dict[str, int] = {}
        crew = WorkerGroup(self.seats[ENGINE], self.seats[REWARD], self.seats[ENVIRONMENTS])
        found = []
        on_node = [place[2] for place in self.places]
        for rank, learner in enumerate(self.learners):
            local = locals_.get(on_node[rank], 0)
            locals_[on_node[rank]] = local + 1
            variables = {"COLUMNS": str(shutil.get_terminal_size((120, 24)).columns)}
            if count > 1:
                # Ray shows a process its own GPUs alone.
                own_size = 1 if self.gpus else on_node.count(on_node[rank])
                variables |= {
                    "MASTER_ADDR": address,
                    "MASTER_PORT": str(port),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(count),
                    "LOCAL_RANK": "0" if self.gpus else str(local),
                    "LOCAL_WORLD_SIZE": str(own_size),
                }
            job = Job(
                self.document,
                self.resume or begun,
                self.overwrite and not begun,
                crew,
                variables,
                tuple(self.told) if rank == 0 else (),
            )
            found.append(learner.run.remote(job))
        self.told, self._learning = [], True
        return found

    @property
    def _resumed(self) -> str:
        """The command that goes on with the run."""
        return f"posttrain {self.recipe.stage} --resume {self.recipe.runs}/{self.recipe.name}"

    def _run_id(self) -> str | None:
        """The id of the run in the recipe's directory; None where there is none."""
        path = Path(self.recipe.runs) / self.recipe.name
        try:
            return str(RunDirectory.open(path).load_environment()["id"])
        except (InputError, KeyError):
            return None

    def _ended(self, references: list[Any]) -> list[Ended] | None:
        """How the learners ended; None where one died, which is counted and told."""
        left, ends, since_lost = dict(enumerate(references)), {}, None
        while left:
            ready, _ = self.ray.wait(list(left.values()), num_returns=len(left), timeout=0.5)
            for rank in [rank for rank, reference in left.items() if reference in ready]:
                try:
                    ends[rank] = self.ray.get(left.pop(rank))
                except Exception as error:
                    said = translated(error)
                    if not isinstance(said, Gone):
                        raise said from error
                    if self._stop:
                        return [Ended(INTERRUPTED)]
                    self._count(f"{LEARNER} {rank}", gone_machine(self.places[rank][2]) or KILLED, self.places[rank][4])
                    return None
            if any(end.lost for end in ends.values()):
                since_lost = since_lost or time.monotonic()
                if time.monotonic() - since_lost > _LOST_SECONDS:
                    self._count(LEARNER, "processes lost each other", self.places[0][4])
                    return None
            elif ends and any(end.code for end in ends.values()) and left:
                since_lost = since_lost or time.monotonic()
                if time.monotonic() - since_lost > _LOST_SECONDS:
                    break
            self._look_for_hangs()
        return [ends[rank] for rank in sorted(ends)]

    def _count(self, name: str, reason: str, pid: int) -> None:
        sentence, too_many = self.ray.get(self.watch.died.remote(name, reason, pid))
        if too_many:
            raise RunError(
                f"{sentence}; that is once more than hardware.max_restarts = {self.recipe.hardware.max_restarts} allows; "
                f"find out why, then go on with `{self._resumed}`"
            )
        # What an earlier learner told after its last checkpoint went with it.
        earlier = self.ray.get(self.watch.all_deaths.remote())[:-1]
        before = f" (before it: {'; '.join(earlier)})" if earlier else ""
        self.told.append(f"{sentence}; all learners went on from the last checkpoint{before}")
        self.console.print(f"{sentence}; all learners go on from the last checkpoint", markup=False, soft_wrap=True)

    def _restart_learners(self) -> None:
        """End the learners that are left, and start all of them anew; engines on their GPUs too."""
        self._learning = False
        for learner in self.learners:
            self.ray.kill(learner)
        self._await_silence()
        self._start_learners()
        if self.gpus and self.seats[ENGINE]:
            for seats in self.seats.values():
                for seat in seats:
                    self.ray.kill(seat.actor)
            self._start_others()

    def _await_silence(self) -> None:
        """Wait until no learner of before holds the run directory."""
        path = Path(self.recipe.runs) / self.recipe.name
        ends = time.monotonic() + 60
        while path.is_dir() and time.monotonic() < ends:
            try:
                with RunDirectory(path).lock():
                    return
            except InputError:
                time.sleep(0.2)

    def _conclude(self, ended: list[Ended]) -> None:
        """Raise what the stage would have raised."""
        if any(end.code == INTERRUPTED for end in ended):
            raise KeyboardInterrupt
        for end in ended:
            if end.code and end.message:
                raise (InputError if end.code == InputError.exit_code else RunError)(end.message)
        if any(end.code for end in ended):
            raise RunError("a learner failed; its output above says why")

    # -- hangs and signals --------------------------------------------------------------------------------------------

    def _look_for_hangs(self) -> None:
        hardware = self.recipe.hardware
        try:
            known = self.ray.get(self.watch.known.remote(), timeout=30)
        except Exception as error:
            if not self._blind:
                said = f"the watch of the run does not answer ({type(error).__name__}), so a worker that hangs is not noticed"
                self.console.print(said, markup=False, soft_wrap=True)
            self._blind = True
            return
        self._blind = False
        for hang in hangs(known, hardware.hang_timeout):
            if not hang.started:
                if hang.name not in self._named:
                    self.console.print(hang.sentence, markup=False, soft_wrap=True)
                self._named.add(hang.name)
                continue
            if hardware.on_hang == "stop":
                raise RunError(
                    f"{hang.sentence}; hardware.on_hang: stop ends the run here; go on with `{self._resumed}`"
                )
            self.console.print(f"{hang.sentence}; it is started again", markup=False, soft_wrap=True)
            self.ray.get(self.watch.because.remote(hang.name, f"hung ({hang.sentence})"))
            self.ray.get(self.watch.forget.remote(hang.name))
            self.ray.kill(self.actors[hang.name], no_restart=hang.name.startswith(LEARNER))

    def _hand_on(self, number: int) -> None:
        """Let the learners stop at a good moment; a second signal, or one before they learn, ends the run at once."""
        self._stop += 1
        if self._stop > 1 or not self._learning:
            raise KeyboardInterrupt
        names = [f"{LEARNER} {i}" for i in range(len(self.learners))]
        threading.Thread(target=lambda: self.watch.order.remote(names, "stop"), daemon=True).start()
