"""The thread that samples ahead of the learner: batch after batch, with the weights that the learner publishes."""

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
from posttrain.rollout.ahead.weights import Published
from posttrain.runs.directory import RunDirectory
from posttrain.runs.files import storage_errors
from posttrain.training.collect import Collected, TaskOrder, collect
from posttrain.training.playing import Playing

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


class Sampler:
    """A thread that makes the batches of a run, in the order of steps. What it has sampled is on disk until it is removed."""

    def __init__(self, recipe: RlRecipe, playing: Playing, published: Published) -> None:
        """`published`: the weights that it may sample with; `playing`: what evaluates beside it."""
        self._recipe, self._playing, self._published = recipe, playing, published
        self._own_engine = isinstance(playing.engine, LocalEngine)
        """Whether it has an engine besides that of evaluation; one outside this process is there once."""
        self._flights = Flights()
        self._events = EventLog(playing.run.path)
        self._replayed = replayed_events(recipe) if recipe.rollout.replay is not None else None
        self._batches: deque[Batch] = deque()
        self._ready = threading.Condition()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, twin: Policy, tasks: TaskOrder, first: int) -> None:
        """Begin with the batch of step `first`, whose tasks are the next of `tasks`. `twin` is the thread's own policy."""
        self._twin = twin
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
        recipe, directory, twin = self._recipe, journals_of(self._playing.run), self._twin
        rollout, engine = recipe.rollout, self._playing.engine
        with storage_errors(directory):
            directory.mkdir(exist_ok=True)
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
            scorer=self._playing.scorer,
            flights=self._flights,
        )
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
        if journal.end is not None:
            collected = collect(player, self._recipe, tasks, journal.step, journal.play)
            collected.seconds, collected.metrics = journal.end["seconds"], dict(journal.end["metrics"])
            collected.counters = EngineCounters(**journal.end["counters"])
            return Batch(journal.step, collected, tasks.state_dict(), 0.0)
        engine, restarts, waits = player.engine, self._flights.restarts, time.perf_counter()
        conductor.wait(journal.step)
        waited = time.perf_counter() - waits
        with self._engine_in_use(engine):
            # Counted inside: an evaluation that uses the same engine is no part of the batch.
            begun, counters = time.perf_counter(), replace(engine.counters)
            conductor.begin(journal.step)
            playing = replace(player, version=conductor.version)
            collected = collect(playing, self._recipe, tasks, journal.step, journal.play)
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
        """Inside, an engine that evaluation uses too is the thread's alone, and has the twin's weights."""
        if self._own_engine:
            yield
            return
        with self._playing.alone:
            engine.policy = self._twin
            try:
                yield
            finally:
                engine.policy = self._playing.policy

    def _thrown_away(self, collected: Collected, before: int, restarts: int) -> None:
        """Count what `restart` gave up; `before`: sampled tokens of the batch that an earlier process left."""
        if self._recipe.rollout.on_new_weights != "restart":
            return
        episodes = [*collected.sampled, *collected.greedy.values()]
        used = sum(episode.sampled_tokens for episode in episodes) - before
        collected.metrics |= {
            "rollout/restarted": float(restarts),
            "tokens/discarded": float(collected.counters.sampled - used),
        }

    def _record(self, step: int, conductor: Conductor, collected: Collected) -> None:
        """Write the events of the batch, before the journal says that it is complete."""
        taken, passes = conductor.end()
        recorded = Recorded(step, taken, passes, digest_of([*collected.sampled, *collected.greedy.values()]))
        if self._replayed is not None:
            require_as_recorded(self._replayed[step], recorded, str(self._recipe.rollout.replay))
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
