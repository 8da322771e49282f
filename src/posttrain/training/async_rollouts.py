"""Asynchronous rollouts: a thread with its own engine samples the next batches while the learner trains.

The thread samples one batch after another, in the order of steps. `rollout.async_rollouts` limits how many steps it is
ahead. Sampled batches stay on disk until a checkpoint covers them, so a killed run reuses them when it resumes.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path
from queue import Queue
from typing import Any

import torch

from posttrain.data.rendering import Renderer
from posttrain.distributed.world import current_world, single_process
from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import EngineCounters
from posttrain.models.policy import Policy
from posttrain.recipe.engines import LocalEngineRecipe
from posttrain.rollout.filters import staleness, token_staleness
from posttrain.rollout.in_flight import AsyncRolloutWorker, InFlight
from posttrain.rollout.journal import EpisodeBuffer, remove_batches
from posttrain.rollout.weight_sync import PublishedWeights, WeightSnapshot, WeightSync
from posttrain.runs.directory import RunDirectory, storage_errors
from posttrain.runs.metrics import record_event
from posttrain.runs.storage import saved_steps
from posttrain.training.rollouts import RolloutBatch, RolloutManager, TaskOrder, collect, counters_since

STOP_SECONDS = 60.0
"""Maximum number of seconds to wait for the thread to end. Calls of the environment are not interrupted."""


SampledBatch = tuple[int, RolloutBatch, dict[str, Any]]
"""A step, its batch, and the state of the task order after its tasks were drawn."""


class Sampler:
    """The thread that samples the batches of a run, in the order of steps."""

    def __init__(
        self, manager: RolloutManager, published: PublishedWeights, run: Path, steps: int, greedy: bool
    ) -> None:
        """`manager`: supplies the settings, and the engine if it runs outside this process. Evaluation uses it too.
        `published`: the weights that the thread may sample with. `run`: the run directory, which holds the batches. `steps`:
        steps of the whole run. `greedy`: as in `collect`."""
        self._manager, self._published, self._directory = manager, published, journals_of(run)
        self._steps, self._greedy = steps, greedy
        self._has_own_engine = isinstance(manager.engine, LocalEngine)
        """Whether the thread has its own engine. An engine outside this process is shared with evaluation."""
        self._in_flight = InFlight()
        self._batches: Queue[SampledBatch | BaseException] = Queue()
        """Those that wait, and last the error that ended the thread."""
        self._thread: threading.Thread | None = None

    def start(self, replica: Policy, tasks: TaskOrder, first: int) -> None:
        """Start with the batch of step `first`, which takes the next tasks. Only the thread uses `replica`."""
        self._replica = replica
        self._thread = threading.Thread(target=self._work, args=(copy(tasks), first), name="rollout", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """Cancel sampling and end the thread. Returns False if a call of the environment still blocks the thread."""
        self._published.stop()
        self._in_flight.stop()
        if self._thread is None:
            return True
        self._thread.join(STOP_SECONDS)
        return not self._thread.is_alive()

    def next(self) -> SampledBatch:
        """Wait for the next batch. Raises the error that ended the thread, if any."""
        batch = self._batches.get()
        if isinstance(batch, BaseException):
            raise batch
        return batch

    def _work(self, tasks: TaskOrder, first: int) -> None:
        try:
            # OpenMP keeps the number of threads per calling thread.
            torch.set_num_threads(torch.get_num_threads())
            self._sample(tasks, first)
        except BaseException as error:
            self._batches.put(error)

    def _sample(self, tasks: TaskOrder, first: int) -> None:
        """Sample all batches in order: first those that an earlier process left on disk, then new ones."""
        manager, directory, replica = self._manager, self._directory, self._replica
        rollout, engine = manager.rollout, manager.engine
        with storage_errors(directory):
            directory.mkdir(exist_ok=True)
        if self._has_own_engine:
            assert isinstance(manager.engine_settings, LocalEngineRecipe)
            engine = LocalEngine(replica, manager.engine_settings)
        mode, ahead = rollout.on_new_weights, rollout.async_rollouts
        sync = WeightSync(mode, ahead, replica, engine, self._published, self._in_flight)
        worker = AsyncRolloutWorker(
            engine=engine,
            renderer=Renderer(replica.tokenizer, replica.end_tokens),
            environment=manager.environment,
            rollout=rollout,
            sampling=rollout.sampling,
            version=0,
            scorer=manager.scorer,
            in_flight=self._in_flight,
        )
        on_disk = True
        for step in range(first, self._steps + 1):
            # The local engine is deterministic, so a partial batch is sampled again to the same bits.
            keep_partial = manager.engine_settings.type != "local"
            with EpisodeBuffer(directory, step, keep_partial=keep_partial) as journal:
                if on_disk and journal.end is None:
                    on_disk = False
                    remove_batches(directory, step + 1)
                self._hand_over(self._batch(journal, sync, worker, tasks))

    def _batch(
        self, journal: EpisodeBuffer, sync: WeightSync, worker: AsyncRolloutWorker, tasks: TaskOrder
    ) -> SampledBatch:
        """The batch of a step, from the journal or sampled."""
        if journal.end is not None:
            batch = collect(worker, tasks, journal.step, self._greedy, journal.collect_episodes)
            batch.seconds, batch.metrics = journal.end["seconds"], dict(journal.end["metrics"])
            batch.counters = EngineCounters(**journal.end["counters"])
            batch.metrics["time/waited_for_learner"] = 0.0
            return journal.step, batch, tasks.state_dict()
        engine, begun = worker.engine, time.perf_counter()
        sync.wait_for(journal.step)
        waited = time.perf_counter() - begun
        # An engine outside this process is shared with evaluation.
        with nullcontext() if self._has_own_engine else self._manager.lock:
            # Count inside the block: an evaluation with the same engine is not part of the batch.
            begun, counters = time.perf_counter(), replace(engine.counters)
            sync.begin_batch(journal.step)
            batch = collect(
                replace(worker, version=sync.version), tasks, journal.step, self._greedy, journal.collect_episodes
            )
            batch.seconds = time.perf_counter() - begun
            batch.counters = counters_since(counters, engine)
        journal.finish({"seconds": batch.seconds, "counters": asdict(batch.counters), "metrics": batch.metrics})
        batch.metrics["time/waited_for_learner"] = waited
        return journal.step, batch, tasks.state_dict()

    def _hand_over(self, batch: SampledBatch) -> None:
        self._batches.put(batch)


def journals_of(run: Path) -> Path:
    """Directory of sampled batches that no checkpoint covers yet."""
    return run / "async_rollouts"


class AsyncRollouts:
    """The batches of a run, sampled by a thread while the learner trains. Its state belongs in the checkpoint."""

    phase = "waited_for_rollout"

    def __init__(
        self, manager: RolloutManager, tasks: TaskOrder, run: RunDirectory, steps: int, greedy: bool = False
    ) -> None:
        """Create the rollouts; `running` starts the thread. `tasks`: the order of tasks as stored in a checkpoint, that is,
        after the batches that were trained on. `steps`: steps of the whole run. `greedy`: as in `collect`."""
        self.manager, self.tasks, self.run = manager, tasks, run
        self.rollout = rollout = manager.rollout
        self._exact = rollout.on_new_weights == "finish"
        """Whether a batch needs the weights of a specific step instead of the newest."""
        self._published = PublishedWeights(rollout.async_rollouts + 1 if self._exact else 1)
        self._sampler = Sampler(manager, self._published, run.path, steps, greedy)
        self._world = current_world()
        self._older: list[WeightSnapshot] = []
        self._step = 0
        """The last step that the learner finished."""
        self._versions: dict[int, int] = {}
        """Step -> version of the weights after that step, for the most recent steps."""

    @contextmanager
    def running(self, step: int) -> Iterator[None]:
        """Sample in the thread inside the block, starting with the batch of `step`."""
        with single_process() as world:
            replica = self.manager.policy.replica() if world.is_rank0 else None
        if replica is not None:
            self._sampler.start(replica, self.tasks, step)
        try:
            yield
        finally:
            if not self._sampler.stop():
                record_event(f"a call of the environment still blocks the rollout thread after {STOP_SECONDS:g} s")
            self._remove_covered()

    def take(self, step: int) -> RolloutBatch:
        """Wait for the batch of `step`. Raises the error that ended the thread, if any. With several processes, rank 0
        samples and broadcasts the batch."""
        begun = time.perf_counter()
        sampled_step, batch, tasks = self._world.on_rank0(self._sampler.next)
        self._remove_covered()
        assert sampled_step == step, f"batch {sampled_step} for step {step}"
        waited = time.perf_counter() - begun
        self.tasks.load_state_dict(tasks)
        oldest = self._versions.get(max(0, step - 1 - self.rollout.async_rollouts), 0)
        for episode in batch.sampled:
            if episode.versions.min(initial=oldest) < oldest:
                raise AssertionError(
                    f"step {step} got a token of version {episode.versions.min()} and rollout.async_rollouts = "
                    f"{self.rollout.async_rollouts} allows version {oldest} or newer"
                )
        version, most = self.manager.policy.version, self.rollout.max_staleness
        batch.metrics |= {
            "time/sampling": batch.seconds,
            "time/overlap_share": max(0.0, 1 - waited / max(batch.seconds, waited, 1e-9)),
        }
        if most is not None:
            fresh = [episode for episode in batch.episodes if staleness(episode, version) <= most]
            batch.metrics["rollout/stale"] = float(len(batch.episodes) - len(fresh))
            batch.episodes = fresh
            if not fresh:
                batch.warnings.append(
                    f"every episode is older than rollout.max_staleness = {most} updates, so no episode is left to train on"
                )
        old = token_staleness(batch.episodes, version)
        if len(old):
            batch.metrics |= {"policy/staleness_mean": float(old.mean()), "policy/staleness_max": float(old.max())}
        return batch

    def learned(self, step: int) -> None:
        """Publish the policy's weights as those after `step`. Call it inside `critical()`, where no signal interrupts."""
        self._step = step
        self._versions[step] = self.manager.policy.version
        for old in [known for known in self._versions if known < step - self.rollout.async_rollouts]:
            del self._versions[old]
        weights = WeightSnapshot.capture(self.manager.policy, step)
        if self._world.is_rank0:
            self._published.publish(weights)

    def tensors(self, saved: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
        """The weights after earlier steps with which the next batches begin."""
        self._older = self._pending()
        return {
            f"{back}/{name}": tensor
            for back, weights in enumerate(self._older, 1)
            for name, tensor in weights.tensors.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Step and version of the weights of `tensors`, and the versions of the last steps."""
        older = [(weights.step, weights.version) for weights in self._pending()]
        return {"versions": sorted(self._versions.items()), "older": older}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`. Call it after the tensors were read."""
        self._versions = dict(map(tuple, state["versions"]))
        if self._world.is_rank0:
            for (step, version), read in zip(reversed(state["older"]), reversed(self._older), strict=True):
                self._published.publish(WeightSnapshot(step, version, read.tensors))

    def _pending(self) -> list[WeightSnapshot]:
        """The weights of 1, 2, ... `async_rollouts` steps ago, on rank 0, if a batch needs them. Before a checkpoint is
        read: uninitialized tensors to read it into."""
        if not (self._exact and self._world.is_rank0):
            return []
        kept = {weights.step: weights for weights in self._published.kept()}
        steps = [max(0, self._step - back) for back in range(1, self.rollout.async_rollouts + 1)]
        return [kept[step] if kept else WeightSnapshot.empty(self.manager.policy) for step in steps]

    def _remove_covered(self) -> None:
        """Delete the batches on disk that no resume will need."""
        if self._world.is_rank0:
            remove_batches(journals_of(self.run.path), 0, max(saved_steps(self.run.checkpoints), default=0))
