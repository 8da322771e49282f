"""Small runs whose sampling is ahead of their learning, and the same in one thread to compare with."""

import io
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console

from posttrain.data.rendering import Renderer
from posttrain.engines.local.engine import LocalEngine
from posttrain.recipe.stages import Recipe
from posttrain.rollout.driver import RolloutWorker
from posttrain.rollout.weight_sync import WeightSnapshot
from posttrain.stages import run_stage
from posttrain.training.rollouts import collect

from . import small


def values(tiny, runs, name: str, rollout: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The small recipe with `rollout` changed; 5 steps, two updates each."""
    made = small.recipe_values(tiny, runs, name=name, steps=5, **changes)
    made["rollout"] = made["rollout"] | rollout
    made["seeds"] = {"start": 0, "count": 40}
    return made


def train(recipe: dict[str, Any], resume: bool = False):
    """Run in this process; returns the run."""
    console = Console(file=io.StringIO(), width=200)
    return run_stage(TypeAdapter(Recipe).validate_python(recipe), resume=resume, console=console)


class OneThread:
    """What `rollout.async_rollouts: n` with `finish` says, plainly: the episodes of step s are sampled, when they are needed, with
    the weights as they were after step s - 1 - n."""

    phase = "rollout"

    def __init__(self, recipe, playing, tasks, trainer):
        self.recipe, self.playing, self.tasks = recipe, playing, tasks
        self.replica = playing.policy.replica()
        self.engine = LocalEngine(self.replica, recipe.engine)
        self.weights = {0: WeightSnapshot.capture(playing.policy, 0)}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def take(self, step):
        weights = self.weights[max(0, step - 1 - self.recipe.rollout.async_rollouts)]
        weights.load_into(self.replica)
        self.engine.load_weights(weights.version)
        player = RolloutWorker(
            self.engine,
            Renderer(self.replica.tokenizer, self.replica.end_tokens),
            self.recipe.environment,
            self.recipe.rollout,
            self.recipe.rollout.sampling,
            weights.version,
            self.playing.scorer,
        )
        before = replace(self.engine.counters)
        collected = collect(player, self.recipe, self.tasks, step)
        collected.counters = self.engine.counters.since(before)
        return collected

    def learned(self, step):
        self.weights[step] = WeightSnapshot.capture(self.playing.policy, step)


def results(run):
    """The exported weights, and the stored episodes with their versions."""
    from posttrain.rollout.store import read_episodes

    files = {file.name: file.read_bytes() for file in sorted((run.path / "model").glob("*.safetensors"))}
    versions = {
        file.name: [s.versions.tolist() for e in read_episodes(file).episodes for s in e.streams]
        for file in sorted(run.episodes.iterdir())
    }
    return files, small.episodes(run.path), versions
