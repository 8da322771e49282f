"""Sampling that runs ahead of learning: a thread with an engine of its own makes the batches that the learner takes.

The thread plays batch after batch, in the order of steps; `rollout.ahead` says how far it may be ahead. What it has
sampled is on disk until a checkpoint covers it, so a run that is killed goes on with it.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from posttrain.data.rendering import Renderer
from posttrain.distribution.world import by_itself
from posttrain.engines.local import LocalEngine
from posttrain.engines.protocol import Engine, EngineCounters
from posttrain.errors import InputError
from posttrain.models.policy import Policy
from posttrain.recipe.rollout import EngineRecipe
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.ahead.conductor import Conductor
from posttrain.rollout.ahead.events import EventLog, Recorded, digest_of, require_as_recorded
from posttrain.rollout.ahead.flights import AheadPlayer, Flights
from posttrain.rollout.ahead.journal import BatchJournal, remove_batches
from posttrain.rollout.ahead.stale import ages, without_stale
from posttrain.rollout.ahead.weights import Published, Weights
from posttrain.runs.directory import RunDirectory
from posttrain.runs.files import storage_errors
from posttrain.training.collect import Collected, TaskOrder, collect
from posttrain.training.playing import Playing
from posttrain.training.trainer import Trainer

STOP_SECONDS = 60.0
"""How long the thread has to end: an environment's call that it is in is not cut off."""


@dataclass
class Batch:
    """The episodes of a step, and the state of the order of tasks after they were drawn."""

    step: int
    collected: Collected
    tasks: dict[str, Any]
    waited: float
    """Seconds for which the thread waited for weights before it."""


class Ahead:
    """The batches of a run, made by a thread while the learner learns. A context manager: inside, the thread works."""

    phase = "waited_for_rollout"

    def __init__(self, recipe: RlRecipe, playing: Playing, tasks: TaskOrder, trainer: Trainer[Any]) -> None:
        """`tasks` is what a checkpoint holds: as it was after the batches that were learned from."""
        self.recipe, self.playing, self.tasks, self.trainer = recipe, playing, tasks, trainer
        rollout = recipe.rollout
        self._exact = rollout.on_new_weights == "finish" or rollout.replay is not None
        """Whether a batch needs the weights of one certain step, and not the newest."""
        self._published = Published(rollout.ahead + 1 if self._exact else 1)
        self._world = trainer.world
        self._own_engine = isinstance(playing.engine, LocalEngine)
        """Whether sampling has an engine besides that of evaluation; one outside this process is there once."""
        self._twin: Policy | None = None
        self._older: list[Weights] = []
        self._versions: dict[int, int] = {}
        """Step -> version of the weights after it, for the last steps."""
        self._flights = Flights()
        self._events = EventLog(playing.run.path)
        self._replayed = replayed_events(recipe) if rollout.replay is not None else None
        self._batches: deque[Batch] = deque()
        self._ready = threading.Condition()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="rollout", daemon=True)
        trainer.companions["ahead"] = self

    # -- the learner's side -------------------------------------------------------------------------------------------

    def __enter__(self) -> "Ahead":
        with by_itself() as world:
            if world.first:
                self._twin = self.playing.policy.twin()
        if self._world.first:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._published.stop()
        self._flights.stop()
        if self._world.first:
            self._thread.join(STOP_SECONDS)
            self._remove_covered()

    def take(self, step: int) -> Collected:
        """The episodes of `step`; waits for them. Whatever stopped the thread is raised here. Where several processes
        learn, the first one samples and all get what it sampled."""
        begun = time.perf_counter()
        batch = self._world.of_first(self._next)
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
        old = ages(collected.episodes, version)
        if len(old):
            collected.metrics |= {"policy/staleness_mean": float(old.mean()), "policy/staleness_max": float(old.max())}
        return collected

    def learned(self, step: int) -> None:
        """The weights are those after `step` now. Call it where no signal interrupts."""
        self._versions[step] = self.trainer.model.version
        for old in [known for known in self._versions if known < step - self.recipe.rollout.ahead]:
            del self._versions[old]
        weights = Weights.of(self.playing.policy, step)
        if self._world.first:
            self._published.publish(weights)

    def _next(self) -> Batch:
        with self._ready:
            while not self._batches and self._error is None:
                self._ready.wait()
            if not self._batches:
                assert self._error is not None
                raise self._error
            batch = self._batches.popleft()
        self._remove_covered()
        return batch

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
        if self._world.first:
            for (step, version), read in zip(reversed(state["older"]), reversed(self._older), strict=True):
                self._published.publish(Weights(step, version, read.tensors))

    def _pending(self) -> list[Weights]:
        """The weights 1, 2, ... `ahead` steps ago in the first process, where they are needed; room for them where a
        checkpoint is to be read."""
        if not (self._exact and self._world.first):
            return []
        kept = {weights.step: weights for weights in self._published.kept()}
        steps = [max(0, self.trainer.step - back) for back in range(1, self.recipe.rollout.ahead + 1)]
        return [kept[step] if kept else Weights.unread(self.playing.policy) for step in steps]

    def _remove_covered(self) -> None:
        """Delete from the buffer what no resume will ask for."""
        remove_batches(journals_of(self.playing.run), 0, max(self.trainer.checkpoints.steps(), default=0))

    def _check_bound(self, step: int, collected: Collected) -> None:
        oldest = self._versions.get(max(0, step - 1 - self.recipe.rollout.ahead), 0)
        for episode in collected.sampled:
            if len(episode.versions) and episode.versions.min() < oldest:
                raise AssertionError(
                    f"step {step} got a token of version {episode.versions.min()} and rollout.ahead = "
                    f"{self.recipe.rollout.ahead} allows version {oldest} or newer"
                )

    def _drop_stale(self, collected: Collected, version: int) -> None:
        rollout = self.recipe.rollout
        if rollout.stale_after is None:
            return
        smallest = 2 if self.recipe.compares_groups else 1
        kept, stale, alone = without_stale(collected.episodes, version, rollout.stale_after, smallest)
        collected.episodes = kept
        collected.metrics |= {"rollout/stale": float(stale), "rollout/stale_alone": float(alone)}
        if not kept:
            collected.messages.append(
                f"every episode is older than rollout.stale_after = {rollout.stale_after} updates, so nothing is learned from"
            )

    # -- the thread's side --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            torch.set_num_threads(torch.get_num_threads())
            self._sample()
        except BaseException as error:
            with self._ready:
                self._error = error
                self._ready.notify_all()

    def _sample(self) -> None:
        """Batch after batch: first those that an earlier process left on disk, then new ones."""
        recipe, directory = self.recipe, journals_of(self.playing.run)
        first = self.trainer.step + 1
        with storage_errors(directory):
            directory.mkdir(exist_ok=True)
        assert self._twin is not None
        twin = self._twin
        rollout = recipe.rollout
        engine: Engine = self.playing.engine
        if self._own_engine:
            assert isinstance(recipe.engine, EngineRecipe)
            engine = LocalEngine(twin, recipe.engine)
        conductor = Conductor(
            rollout.on_new_weights, rollout.ahead, twin, engine, self._published, self._flights, self._replayed
        )
        player = AheadPlayer(
            engine=engine,
            renderer=Renderer(twin.tokenizer, twin.end_tokens),
            environment=recipe.environment,
            rollout=rollout,
            sampling=rollout.sampling,
            version=0,
            scorer=self.playing.scorer,
            flights=self._flights,
        )
        tasks = self.tasks.copy()
        left = True
        for step in range(first, recipe.steps + 1):
            # The local engine computes the same after the same requests, so it samples a whole batch again to the same bits.
            with BatchJournal(directory, step, keep_partial=recipe.engine.type != "local") as journal:
                if left and not journal.complete:
                    left = False
                    remove_batches(directory, step + 1)
                    self._events.keep_until(step - 1)
                self._hand_over(self._batch(journal, conductor, player, tasks))

    def _batch(self, journal: BatchJournal, conductor: Conductor, player: AheadPlayer, tasks: TaskOrder) -> Batch:
        """The episodes of a step, from the journal or sampled."""
        begun, waited, restarts = time.perf_counter(), 0.0, self._flights.restarts
        counters = replace(player.engine.counters)
        if journal.complete:
            collected = collect(player, self.recipe, tasks, journal.step, journal.play)
        else:
            conductor.wait(journal.step)
            waited = time.perf_counter() - begun
            with self._engine_in_use(player.engine):
                conductor.begin(journal.step)
                playing = replace(player, version=conductor.version)
                collected = collect(playing, self.recipe, tasks, journal.step, journal.play)
            collected.messages += player.engine.take_messages()
        if journal.end is None:
            collected.seconds = time.perf_counter() - begun - waited
            collected.counters = player.engine.counters.since(counters)
            collected.metrics = self._thrown_away(collected, self._flights.restarts - restarts)
            self._record(journal.step, conductor, collected)
            journal.finish(
                {
                    "seconds": collected.seconds,
                    "counters": asdict(collected.counters),
                    "metrics": collected.metrics,
                    "tasks": tasks.state_dict(),
                }
            )
        else:
            collected.seconds, collected.metrics = journal.end["seconds"], dict(journal.end["metrics"])
            collected.counters = EngineCounters(**journal.end["counters"])
        return Batch(journal.step, collected, tasks.state_dict(), waited)

    @contextmanager
    def _engine_in_use(self, engine: Engine) -> Iterator[None]:
        """Inside, an engine that evaluation uses too is the thread's alone, and has the twin's weights."""
        if self._own_engine:
            yield
            return
        assert self._twin is not None
        with self.playing.alone:
            engine.policy = self._twin
            try:
                yield
            finally:
                engine.policy = self.playing.policy

    def _thrown_away(self, collected: Collected, restarts: int) -> dict[str, float]:
        if self.recipe.rollout.on_new_weights != "restart":
            return {}
        episodes = [*collected.sampled, *collected.greedy.values()]
        discarded = collected.counters.sampled - sum(episode.sampled_tokens for episode in episodes)
        return {"rollout/restarted": float(restarts), "tokens/discarded": float(max(0, discarded))}

    def _record(self, step: int, conductor: Conductor, collected: Collected) -> None:
        """Write the events of the batch, before the journal says that it is complete."""
        taken, passes = conductor.end()
        recorded = Recorded(step, taken, passes, digest_of([*collected.sampled, *collected.greedy.values()]))
        if self._replayed is not None:
            require_as_recorded(self._replayed[step], recorded, str(self.recipe.rollout.replay))
        self._events.append(recorded)

    def _hand_over(self, batch: Batch) -> None:
        with self._ready:
            self._batches.append(batch)
            self._ready.notify_all()


def journals_of(run: RunDirectory) -> Path:
    """Where a run keeps what it has sampled and no checkpoint covers."""
    return run.path / "ahead"


def replayed_events(recipe: RlRecipe) -> dict[int, Recorded]:
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
