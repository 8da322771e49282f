"""Critic and reference model on separate GPUs (`hardware.dedicated`): the workers, and the learner's side of the calls.

A worker of the reference model has a complete copy and no other state; if it dies, its call is repeated. The workers of
the critic shard one model, as learners do (FSDP2), and its state is in the run's checkpoints; if one dies, learners and
critic continue from the last checkpoint.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from posttrain.distributed.ray.actors import ModelWorker, Worker, recipe_from
from posttrain.distributed.ray.worker_group import StateLost, WorkerClient, WorkerDied, call_in_parts
from posttrain.distributed.tensors import read_tensors, write_tensors
from posttrain.distributed.world import current_world, join_world
from posttrain.models.load import load_tokenizer
from posttrain.models.policy import Policy
from posttrain.training.critic import open_critic
from posttrain.training.objectives import token_forward
from posttrain.training.updater import Sample, Totals, by_sample, in_batches

T = TypeVar("T")


def rank_variables(locations: Sequence[tuple[Any, ...]], has_gpus: bool) -> list[dict[str, str]]:
    """Environment variables that make the workers at `locations` (`Worker.location`) the ranks of one process group."""
    if len(locations) == 1:
        return [{}]
    (address, port, *_), nodes = locations[0], [location[2] for location in locations]
    shared = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(len(locations))}
    variables = []
    for rank, node in enumerate(nodes):
        # Ray makes only its own GPUs visible to a process.
        local, local_size = (0, 1) if has_gpus else (nodes[:rank].count(node), nodes.count(node))
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(local_size)}
        variables.append(shared | ranks)
    return variables


class ReferenceWorker(ModelWorker):
    """A copy of the reference model."""

    def __init__(self, *common: Any) -> None:
        super().__init__(*common)
        policy = Policy(self.recipe.model, self.recipe.seed, trained=False)
        self._forward = token_forward(policy, self.recipe.learner, self.recipe.rollout.sampling.temperature)

    def logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Log-probabilities [n] float32 of the sampled tokens of each sample."""

        def scored(batch: Sequence[Sample]) -> list[np.ndarray]:
            self.heartbeat.progress += 1
            return by_sample(self._forward(batch).logprobs.float(), batch)

        return in_batches(samples, self.recipe.learner.tokens_per_batch, "learner.tokens_per_batch", scored)


class CriticWorker(Worker):
    """One process of the critic, with methods of `CriticUpdater`."""

    def __init__(self, document: str, *common: Any) -> None:
        super().__init__(*common)
        self.recipe = recipe_from(document)
        self._held = ExitStack()

    def open(self, processes: int, variables: dict[str, str]) -> int:
        """Load the critic as one of `processes` ranks; returns the bytes of its checkpoint on this rank."""
        recipe = self.recipe
        os.environ.update(variables)
        hardware = recipe.hardware.model_copy(update={"processes": processes})
        self._held.enter_context(join_world(hardware, recipe.model.device))
        # The attributes that a critic needs of a policy, which is in another process.
        policy: Any = SimpleNamespace(recipe=recipe.model, tokenizer=load_tokenizer(recipe.model))
        self.critic = open_critic(recipe, policy)
        forward = self.critic.learner.forward

        def counted(samples: Sequence[Sample]) -> Any:
            self.heartbeat.progress += 1
            return forward(samples)

        self.critic.learner.forward = counted
        return sum(t.numel() * t.element_size() for t in self.critic.tensors().values())

    def state_dict(self) -> dict[str, Any]:
        return self.critic.state_dict()

    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return self.critic.begin_values(samples)()

    def update(self, samples: Sequence[Sample]) -> tuple[Totals, list[str], dict[str, Any]]:
        """Make one optimizer step; returns its metrics, the warnings since the last one, and the counters after it."""
        return self.critic.begin_update(samples)(), self.critic.take_warnings(), self.critic.state_dict()

    def write(self, directory: str) -> None:
        """Write the tensors of a checkpoint, each rank its share."""
        write_tensors(Path(directory), self.critic.tensors())

    def read(self, directory: str, state: dict[str, Any]) -> None:
        """Restore the tensors that `write` wrote, and the counters of that checkpoint."""
        read_tensors(Path(directory), self.critic.tensors(state))
        self.critic.load_state_dict(state)


def _started(work: Callable[[], T]) -> Callable[[], T]:
    """Begin `work` in a thread of rank 0. The returned function waits for it and returns its result on every rank."""
    world = current_world()
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    if world.is_rank0:
        threading.Thread(target=run, daemon=True, name="call of workers").start()
    return lambda: world.on_rank0(future.result)


class RayReference:
    """The reference model on workers, as a `ReferenceModel`."""

    def __init__(self, workers: Sequence[WorkerClient]) -> None:
        self.workers = list(workers)

    def load(self) -> None:
        """No effect: the workers have loaded it."""

    def begin(self, samples: Sequence[Sample]) -> Callable[[], list[np.ndarray]]:
        """As `ReferenceModel.begin`. Each worker scores a contiguous part of the samples."""
        given = _for_scoring(samples)
        return _started(lambda: call_in_parts(self.workers, given, "reference log-probabilities", "logprobs"))


class RayCritic:
    """The critic on workers, as a `CriticUpdater`. Tensors stay on the workers; `write` and `read` serve
    checkpoints."""

    head = None
    sleepers = ()
    """None: no engine uses the workers' devices."""

    def __init__(self, workers: Sequence[WorkerClient], has_gpus: bool) -> None:
        self.workers = list(workers)
        self._warnings: list[str] = []
        self._pool = ThreadPoolExecutor(len(self.workers))

        def opened() -> tuple[int, dict[str, Any]]:
            locations = self._on_all("the address", "location")
            variables = rank_variables(locations, has_gpus)
            calls = [
                self._pool.submit(self._once, worker, "the critic's start", "open", len(workers), mine)
                for worker, mine in zip(self.workers, variables, strict=True)
            ]
            return sum(call.result() for call in calls), self._once(self.workers[0], "its state", "state_dict")

        self.size, self._state = current_world().on_rank0(opened)

    @property
    def updates(self) -> int:
        """Optimizer steps so far."""
        return int(self._state["optimizer"]["updates"])

    def begin_values(self, samples: Sequence[Sample]) -> Callable[[], list[np.ndarray]]:
        given = _for_scoring(samples)
        return _started(lambda: self._on_all(f"{len(samples)} values", "values", given)[0])

    def begin_update(self, samples: Sequence[Sample]) -> Callable[[], Totals]:
        given = _for_scoring(samples)
        finish = _started(lambda: self._on_all("an update of the critic", "update", given)[0])

        def finished() -> Totals:
            totals, warnings, self._state = finish()
            self._warnings += warnings
            return totals

        return finished

    def take_warnings(self) -> list[str]:
        warnings, self._warnings = self._warnings, []
        return warnings

    def tensors(self, saved: Any = None) -> dict[str, Any]:
        """Empty: the tensors are on the workers."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The counters of the workers."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters here; `read` restores those of the workers."""
        self._state = state

    def write(self, directory: Path) -> None:
        """Let the workers write their tensors to `directory`, which they must reach under the same path. For rank 0."""
        self._on_all("a checkpoint", "write", str(directory.absolute()))

    def read(self, directory: Path) -> None:
        """Let the workers read the tensors that they wrote, after `load_state_dict`. For rank 0."""
        self._on_all("a checkpoint", "read", str(directory.absolute()), self._state)

    def _on_all(self, what: str, method: str, *arguments: Any) -> list[Any]:
        """The results of a method on every worker, called at the same time. Arguments are sent once."""
        import ray

        given = [ray.put(argument) for argument in arguments]
        calls = [self._pool.submit(self._once, worker, what, method, *given) for worker in self.workers]
        return [call.result() for call in calls]

    @staticmethod
    def _once(worker: WorkerClient, what: str, method: str, *arguments: Any) -> Any:
        try:
            return worker.call_once(what, method, *arguments)
        except WorkerDied as error:
            raise StateLost(worker.name, worker.pid) from error


def _for_scoring(samples: Sequence[Sample]) -> list[Sample]:
    """Copies of the samples with only the fields that values and updates of a critic need."""
    return [
        Sample(s.stream, s.label, s.advantages, values=s.values, returns=s.returns, episode=s.episode, group=s.group)
        for s in samples
    ]
