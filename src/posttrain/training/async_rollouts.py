"""Sampling that runs ahead of learning: a thread with an engine of its own makes the batches that the learner takes.

The thread plays batch after batch, in the order of steps; `rollout.async_rollouts` says how far it may be ahead. What it has
sampled is on disk until a checkpoint covers it, so a run that is killed goes on with it.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from posttrain.data.rendering import Renderer
from posttrain.distributed.world import current, single_process
from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import Engine, EngineCounters
from posttrain.errors import InputError
from posttrain.models.policy import Policy
from posttrain.recipe.engines import LocalEngineRecipe
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.filters import drop_stale, token_staleness
from posttrain.rollout.in_flight import AsyncRolloutWorker, InFlight
from posttrain.rollout.journal import (
    BatchEvents,
    EpisodeBuffer,
    EventLog,
    check_replay,
    episodes_digest,
    remove_batches,
)
from posttrain.rollout.weight_sync import PublishedWeights, WeightSnapshot, WeightSync
from posttrain.runs.directory import RunDirectory
from posttrain.runs.files import storage_errors
from posttrain.training.rollout_manager import RolloutManager
from posttrain.training.rollouts import RolloutBatch, TaskOrder, collect
from posttrain.training.trainer import Trainer

STOP_SECONDS = 60.0
"""How long the thread has to end: an environment's call that it is in is not cut off."""


@dataclass
class Batch:
    """The episodes of a step, and the state of the order of tasks after they were drawn."""

    step: int
    collected: RolloutBatch
    tasks: dict[str, Any]
    waited: float
    """Seconds for which the thread waited for weights before it."""


class Sampler:
    """A thread that makes the batches of a run, in the order of steps. What it has sampled is on disk until it is removed."""

    def __init__(self, recipe: RlRecipe, playing: RolloutManager, published: PublishedWeights) -> None:
        """`published`: the weights that it may sample with; `playing`: what evaluates beside it."""
        self._recipe, self._playing, self._published = recipe, playing, published
        self._own_engine = isinstance(playing.engine, LocalEngine)
        """Whether it has an engine besides that of evaluation; one outside this process is there once."""
        self._flights = InFlight()
        self._events = EventLog(playing.run.path)
        self._replayed = replayed_events(recipe) if recipe.rollout.replay is not None else None
        self._batches: deque[Batch] = deque()
        self._ready = threading.Condition()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, replica: Policy, tasks: TaskOrder, first: int) -> None:
        """Begin with the batch of step `first`, whose tasks are the next of `tasks`. `replica` is the thread's own policy."""
        self._replica = replica
        work = (tasks.copy(), first)
        self._thread = threading.Thread(target=self._work, args=work, name="rollout", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """Give up what is being sampled, and end; False where an environment's call still keeps the thread."""
        self._published.stop()
        self._flights.stop()
        if self._thread is None:
            return True
        self._thread.join(STOP_SECONDS)
        return not self._thread.is_alive()

    def next(self) -> Batch:
        """The next batch, once it is there. Whatever stopped the thread is raised here."""
        with self._ready:
            while not self._batches and self._error is None:
                self._ready.wait()
            if not self._batches:
                assert self._error is not None
                raise self._error
            return self._batches.popleft()

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _work(self, tasks: TaskOrder, first: int) -> None:
        try:
            # OpenMP counts threads by the thread that asks.
            torch.set_num_threads(torch.get_num_threads())
            self._sample(tasks, first)
        except BaseException as error:
            with self._ready:
                self._error = error
                self._ready.notify_all()

    def _sample(self, tasks: TaskOrder, first: int) -> None:
        """Batch after batch: first those that an earlier process left on disk, then new ones."""
        recipe, directory, replica = self._recipe, journals_of(self._playing.run), self._replica
        rollout, engine = recipe.rollout, self._playing.engine
        with storage_errors(directory):
            directory.mkdir(exist_ok=True)
        if self._own_engine:
            assert isinstance(recipe.engine, LocalEngineRecipe)
            engine = LocalEngine(replica, recipe.engine)
        conductor = WeightSync(
            rollout.on_new_weights,
            rollout.async_rollouts,
            replica,
            engine,
            self._published,
            self._flights,
            self._replayed,
        )
        player = AsyncRolloutWorker(
            engine=engine,
            renderer=Renderer(replica.tokenizer, replica.end_tokens),
            environment=recipe.environment,
            rollout=rollout,
            sampling=rollout.sampling,
            version=0,
            scorer=self._playing.scorer,
            in_flight=self._flights,
        )
        left = True
        for step in range(first, recipe.steps + 1):
            # The local engine computes the same after the same requests, so it samples a whole batch again to the same bits.
            with EpisodeBuffer(directory, step, keep_partial=recipe.engine.type != "local") as journal:
                if left and not journal.complete:
                    left = False
                    remove_batches(directory, step + 1)
                    self._events.keep_until(step - 1)
                self._hand_over(self._batch(journal, conductor, player, tasks))

    def _batch(
        self, journal: EpisodeBuffer, conductor: WeightSync, player: AsyncRolloutWorker, tasks: TaskOrder
    ) -> Batch:
        """The episodes of a step, from the journal or sampled."""
        if journal.end is not None:
            collected = collect(player, self._recipe, tasks, journal.step, journal.collect_episodes)
            collected.seconds, collected.metrics = journal.end["seconds"], dict(journal.end["metrics"])
            collected.counters = EngineCounters(**journal.end["counters"])
            return Batch(journal.step, collected, tasks.state_dict(), 0.0)
        engine, restarts, waits = player.engine, self._flights.restarts, time.perf_counter()
        conductor.wait_for(journal.step)
        waited = time.perf_counter() - waits
        with self._engine_in_use(engine):
            # Counted inside: an evaluation that uses the same engine is no part of the batch.
            begun, counters = time.perf_counter(), replace(engine.counters)
            conductor.begin_batch(journal.step)
            playing = replace(player, version=conductor.version)
            collected = collect(playing, self._recipe, tasks, journal.step, journal.collect_episodes)
            collected.seconds = time.perf_counter() - begun
            collected.counters = engine.counters.since(counters)
            self._thrown_away(collected, journal.tokens_before, self._flights.restarts - restarts)
            self._record(journal.step, conductor, collected)
        journal.finish(
            {
                "seconds": collected.seconds,
                "counters": asdict(collected.counters),
                "metrics": collected.metrics,
            }
        )
        return Batch(journal.step, collected, tasks.state_dict(), waited)

    @contextmanager
    def _engine_in_use(self, engine: Engine) -> Iterator[None]:
        """Inside, an engine that evaluation uses too is the thread's alone, and has the replica's weights."""
        if self._own_engine:
            yield
            return
        with self._playing.lock:
            engine.policy = self._replica
            try:
                yield
            finally:
                engine.policy = self._playing.policy

    def _thrown_away(self, collected: RolloutBatch, before: int, restarts: int) -> None:
        """Count what `restart` gave up; `before`: sampled tokens of the batch that an earlier process left."""
        if self._recipe.rollout.on_new_weights != "restart":
            return
        episodes = [*collected.sampled, *collected.greedy.values()]
        used = sum(episode.sampled_tokens for episode in episodes) - before
        collected.metrics |= {
            "rollout/restarted": float(restarts),
            "tokens/discarded": float(collected.counters.sampled - used),
        }

    def _record(self, step: int, conductor: WeightSync, collected: RolloutBatch) -> None:
        """Write the events of the batch, before the journal says that it is complete."""
        taken, passes = conductor.end_batch()
        recorded = BatchEvents(step, taken, passes, episodes_digest([*collected.sampled, *collected.greedy.values()]))
        if self._replayed is not None:
            check_replay(self._replayed[step], recorded, str(self._recipe.rollout.replay))
        self._events.append(recorded)

    def _hand_over(self, batch: Batch) -> None:
        with self._ready:
            self._batches.append(batch)
            self._ready.notify_all()


def journals_of(run: RunDirectory) -> Path:
    """Where a run keeps what it has sampled and no checkpoint covers."""
    return run.path / "ahead"


def replayed_events(recipe: RlRecipe) -> dict[int, BatchEvents]:
    """The events of the run that is replayed; InputError unless that had the same recipe."""
    assert recipe.rollout.replay is not None
    run = RunDirectory.open(recipe.rollout.replay)
    mine, theirs = (_values(each) for each in (recipe, run.load_recipe()))
    changed = [key for key in mine if mine[key] != theirs.get(key)]
    if changed:
        raise InputError(
            f"rollout.replay: {run.path} had another value of {', '.join(changed)}, and events are replayed with the recipe that "
            "they were recorded with; take its recipe.yaml with another `name`"
        )
    return EventLog(run.path).read()


def _values(recipe: Any) -> dict[str, Any]:
    values = recipe.model_dump(mode="json")
    for key in ("name", "runs", "sinks"):
        values.pop(key, None)
    values.get("rollout", {}).pop("replay", None)
    return values


class Ahead:
    """The batches of a run, made by a thread while the learner learns. A context manager: inside, the thread works."""

    phase = "waited_for_rollout"

    def __init__(self, recipe: RlRecipe, playing: RolloutManager, tasks: TaskOrder, trainer: Trainer[Any]) -> None:
        """`tasks` is what a checkpoint holds: as it was after the batches that were learned from."""
        self.recipe, self.playing, self.tasks, self.trainer = recipe, playing, tasks, trainer
        rollout = recipe.rollout
        self._exact = rollout.on_new_weights == "finish" or rollout.replay is not None
        """Whether a batch needs the weights of one certain step, and not the newest."""
        self._published = PublishedWeights(rollout.async_rollouts + 1 if self._exact else 1)
        self._sampler = Sampler(recipe, playing, self._published)
        self._world = trainer.world
        self._older: list[WeightSnapshot] = []
        self._versions: dict[int, int] = {}
        """Step -> version of the weights after it, for the last steps."""
        trainer.checkpointables["ahead"] = self

    # -- the learner's side -------------------------------------------------------------------------------------------

    def __enter__(self) -> "Ahead":
        if self.recipe.kl.coefficient > 0:
            # While transformers loads a model, torch's default precision is that of the model, in all threads.
            with self.playing.policy.as_reference():
                pass
        with single_process() as world:
            replica = self.playing.policy.replica() if world.is_rank0 else None
        if replica is not None:
            self._sampler.start(replica, self.tasks, self.trainer.step + 1)
        return self

    def __exit__(self, *error: object) -> None:
        if not self._sampler.stop():
            self.trainer.warn(
                [f"a call of the environment keeps the thread that samples after {STOP_SECONDS:g} s; it is left behind"]
            )
        self._remove_covered()

    def take(self, step: int) -> RolloutBatch:
        """The episodes of `step`; waits for them. Whatever stopped the thread is raised here. Where several processes
        learn, the first one samples and all get what it sampled."""
        begun = time.perf_counter()
        batch = self._world.on_rank0(self._sampler.next)
        self._remove_covered()
        assert batch.step == step, f"batch {batch.step} for step {step}"
        collected, waited = batch.collected, time.perf_counter() - begun
        self.tasks.load_state_dict(batch.tasks)
        self._check_bound(step, collected)
        version = self.trainer.model.version
        collected.metrics |= {
            "time/waited_for_learner": batch.waited,
            "time/sampling": collected.seconds,
            "time/overlap_share": max(0.0, 1 - waited / max(collected.seconds, waited, 1e-9)),
        }
        self._drop_stale(collected, version)
        old = token_staleness(collected.episodes, version)
        if len(old):
            collected.metrics |= {"policy/staleness_mean": float(old.mean()), "policy/staleness_max": float(old.max())}
        return collected

    def learned(self, step: int) -> None:
        """The weights are those after `step` now. Call it where no signal interrupts."""
        self._versions[step] = self.trainer.model.version
        for old in [known for known in self._versions if known < step - self.recipe.rollout.async_rollouts]:
            del self._versions[old]
        weights = WeightSnapshot.capture(self.playing.policy, step)
        if self._world.is_rank0:
            self._published.publish(weights)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights after the last steps before this one, which batches of the coming steps begin with."""
        self._older = self._pending()
        return {
            f"{back}/{name}": tensor
            for back, weights in enumerate(self._older, 1)
            for name, tensor in weights.tensors.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Which weights those of `tensors` are, and the versions of the last steps."""
        older = [(weights.step, weights.version) for weights in self._pending()]
        return {"versions": sorted(self._versions.items()), "older": older}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._versions = dict(map(tuple, state["versions"]))
        if self._world.is_rank0:
            for (step, version), read in zip(reversed(state["older"]), reversed(self._older), strict=True):
                self._published.publish(WeightSnapshot(step, version, read.tensors))

    def _pending(self) -> list[WeightSnapshot]:
        """The weights 1, 2, ... `ahead` steps ago in the first process, where they are needed; room for them where a
        checkpoint is to be read."""
        if not (self._exact and self._world.is_rank0):
            return []
        kept = {weights.step: weights for weights in self._published.kept()}
        steps = [max(0, self.trainer.step - back) for back in range(1, self.recipe.rollout.async_rollouts + 1)]
        return [kept[step] if kept else WeightSnapshot.empty(self.playing.policy) for step in steps]

    def _remove_covered(self) -> None:
        """Delete from the buffer what no resume will ask for."""
        if self._world.is_rank0:
            remove_batches(journals_of(self.playing.run), 0, max(self.trainer.checkpoints.steps(), default=0))

    def _check_bound(self, step: int, collected: RolloutBatch) -> None:
        oldest = self._versions.get(max(0, step - 1 - self.recipe.rollout.async_rollouts), 0)
        for episode in collected.sampled:
            if len(episode.versions) and episode.versions.min() < oldest:
                raise AssertionError(
                    f"step {step} got a token of version {episode.versions.min()} and rollout.async_rollouts = "
                    f"{self.recipe.rollout.async_rollouts} allows version {oldest} or newer"
                )

    def _drop_stale(self, collected: RolloutBatch, version: int) -> None:
        rollout = self.recipe.rollout
        if rollout.max_staleness is None:
            return
        smallest = 2 if self.recipe.compares_groups else 1
        kept, stale, alone = drop_stale(collected.episodes, version, rollout.max_staleness, smallest)
        collected.episodes = kept
        collected.metrics |= {"rollout/stale": float(stale), "rollout/stale_alone": float(alone)}
        if not kept:
            collected.messages.append(
                f"every episode is older than rollout.max_staleness = {rollout.max_staleness} updates, so nothing is learned from"
            )


class Rollouts(Protocol):
    """The episodes of a run, step by step. A context manager around the steps."""

    phase: str
    """What the time of `take` is called in the metrics."""

    def __enter__(self) -> "Rollouts": ...

    def __exit__(self, *error: object) -> None: ...

    def take(self, step: int) -> RolloutBatch:
        """The episodes that `step` learns from."""
        ...

    def learned(self, step: int) -> None:
        """The weights are those after `step` now."""
        ...


class InStep:
    """First sample, then learn: `rollout.async_rollouts: 0`."""

    phase = "rollout"

    def __init__(self, recipe: RlRecipe, playing: RolloutManager, tasks: TaskOrder) -> None:
        self.recipe, self.playing, self.tasks = recipe, playing, tasks
        self.world = current()

    def __enter__(self) -> "InStep":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def take(self, step: int) -> RolloutBatch:
        begun, counters = time.perf_counter(), replace(self.playing.engine.counters)
        with self.playing.player(self.recipe.rollout.sampling) as player:
            collected = collect(player, self.recipe, self.tasks, step)
        own = asdict(self.playing.engine.counters.since(counters))
        done = self.world.gather([own])
        collected.counters = EngineCounters(**{name: sum(each[name] for each in done) for name in own})
        collected.seconds = time.perf_counter() - begun
        return collected

    def learned(self, step: int) -> None:
        pass


def open_rollouts(recipe: RlRecipe, playing: RolloutManager, tasks: TaskOrder, trainer: Trainer[Any]) -> Rollouts:
    """The rollouts of the recipe; `tasks` are in the trainer's checkpoints, and what else must be is added to them."""
    return Ahead(recipe, playing, tasks, trainer) if recipe.rollout.async_rollouts else InStep(recipe, playing, tasks)
