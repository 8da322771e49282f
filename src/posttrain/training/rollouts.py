"""Where a step's episodes come from: sampled in the step, or ahead of it."""

import time
from dataclasses import asdict, replace
from typing import Any, Protocol

from posttrain.distribution.world import current
from posttrain.engines.protocol import EngineCounters
from posttrain.recipe.stages import RlRecipe
from posttrain.training.ahead import Ahead
from posttrain.training.collect import Collected, TaskOrder, collect
from posttrain.training.playing import Playing
from posttrain.training.trainer import Trainer


class Rollouts(Protocol):
    """The episodes of a run, step by step. A context manager around the steps."""

    phase: str
    """What the time of `take` is called in the metrics."""

    def __enter__(self) -> "Rollouts": ...

    def __exit__(self, *error: object) -> None: ...

    def take(self, step: int) -> Collected:
        """The episodes that `step` learns from."""
        ...

    def learned(self, step: int) -> None:
        """The weights are those after `step` now."""
        ...


class InStep:
    """First sample, then learn: `rollout.ahead: 0`."""

    phase = "rollout"

    def __init__(self, recipe: RlRecipe, playing: Playing, tasks: TaskOrder) -> None:
        self.recipe, self.playing, self.tasks = recipe, playing, tasks
        self.world = current()

    def __enter__(self) -> "InStep":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def take(self, step: int) -> Collected:
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


def open_rollouts(recipe: RlRecipe, playing: Playing, tasks: TaskOrder, trainer: Trainer[Any]) -> Rollouts:
    """The rollouts of the recipe; `tasks` are in the trainer's checkpoints, and what else must be is added to them."""
    return Ahead(recipe, playing, tasks, trainer) if recipe.rollout.ahead else InStep(recipe, playing, tasks)
