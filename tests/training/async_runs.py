"""Small runs whose sampling is ahead of their learning, and the same in one thread to compare with."""

import io
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console

from posttrain.data.rendering import Renderer
from posttrain.engines.local.engine import LocalEngine
from posttrain.recipe.stages import Recipe
from posttrain.rollout.driver import RolloutWorker
from posttrain.rollout.weight_sync import WeightSnapshot
from posttrain.runs.directory import RunDirectory
from posttrain.training import rl
from posttrain.training.rollouts import collect, counters_since

from . import small


def values(tiny, runs, name: str, rollout: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The small recipe with `rollout` changed; 5 steps, two updates each."""
    made = small.recipe_values(tiny, runs, name=name, steps=5, **changes)
    made["rollout"] = made["rollout"] | rollout
    made["seeds"] = {"start": 0, "count": 40}
    return made


def train(recipe: dict[str, Any], resume: bool = False):
    """Run in this process; returns the run."""
    return small.train(recipe, resume=resume)[0]


def train_with(rollouts, recipe: dict[str, Any]):
    """Train with the rollouts that `rollouts` makes; returns the run."""
    validated = TypeAdapter(Recipe).validate_python(recipe)
    run = RunDirectory.create(validated)
    rl.train(validated, run, False, Console(file=io.StringIO(), width=200), make_rollouts=rollouts)
    return run


class OneThread:
    """`rollout.async_rollouts: n` with `finish` in one thread: the episodes of step s are sampled in step s, with the weights
    as they were after step s - 1 - n."""

    phase = "rollout"

    def __init__(self, recipe, manager, tasks, run):
        self.recipe, self.manager, self.tasks = recipe, manager, tasks
        self.replica = manager.policy.replica()
        self.engine = LocalEngine(self.replica, recipe.engine)
        self.weights = {0: WeightSnapshot.capture(manager.policy, 0)}

    @contextmanager
    def running(self, step):
        yield

    def take(self, step):
        weights = self.weights[max(0, step - 1 - self.recipe.rollout.async_rollouts)]
        weights.load_into(self.replica)
        self.engine.load_weights(weights.version)
        renderer, rollout = Renderer(self.replica.tokenizer, self.replica.end_tokens), self.recipe.rollout
        worker = RolloutWorker(
            engine=self.engine,
            renderer=renderer,
            environment=self.manager.environment,
            rollout=rollout,
            sampling=rollout.sampling,
            version=weights.version,
            scorer=self.manager.scorer,
        )
        before = replace(self.engine.counters)
        batch = collect(worker, self.tasks, step)
        batch.counters = counters_since(before, self.engine)
        return batch

    def learned(self, step):
        self.weights[step] = WeightSnapshot.capture(self.manager.policy, step)


def results(run):
    """The exported weights, and the stored episodes with their versions."""
    from posttrain.rollout.store import read_episodes

    files = {file.name: file.read_bytes() for file in sorted((run.path / "model").glob("*.safetensors"))}
    versions = {
        file.name: [s.versions.tolist() for e in read_episodes(file).episodes for s in e.streams]
        for file in sorted(run.episodes.iterdir())
    }
    return files, small.episodes(run.path), versions
