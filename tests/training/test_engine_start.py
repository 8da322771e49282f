"""An engine on the learners' GPUs starts and wakes up while they leave it the memory that it needs."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from rich.console import Console

from posttrain.engines.vllm import engine
from posttrain.models.policy import Policy
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.runs.directory import RunDirectory
from posttrain.training import distill, rl, rollouts, sft


class Started(Exception):
    """The engine starts."""


@pytest.mark.parametrize(
    ("stage", "module", "keys"),
    [
        ("rl", rl, []),
        ("distill", distill, ["teacher.policy=initial", "teacher.context=Think."]),
        ("sft", sft, ["experts.seeds.count=4"]),
    ],
)
def test_the_engine_starts_before_the_optimizer_is_made(stage, module, keys, tiny_model, tmp_path, monkeypatch):
    def started(*arguments, **named):
        raise Started

    def too_early(*arguments, **named):
        raise AssertionError("the optimizer's state exists before the engine")

    monkeypatch.setattr(module, "RolloutManager", started)
    monkeypatch.setattr(module, "Optimizer", too_early)
    recipe = load_recipe([], [*keys, "environment.type=bandit", f"model.path={tiny_model}", f"runs={tmp_path}"], stage)
    with pytest.raises(Started):
        module.train(recipe, RunDirectory.create(recipe, False), False, Console())


class Processes:
    """Two processes, of which this is the second; records when it waits for the other."""

    is_rank0, is_single_process, size, sharded = False, False, 2, True

    def __init__(self, events):
        self.events = events

    def on_rank0(self, work):
        self.events.append("wait for rank 0")

    def barrier(self):
        self.events.append("wait for all")


def test_every_process_waits_for_the_engine_of_the_first_before_it_allocates_more(tiny_model, monkeypatch):
    events = []
    monkeypatch.setattr(engine, "current_world", lambda: Processes(events))
    monkeypatch.setattr(Policy, "release_cached_memory", lambda policy: events.append("free"))
    engine.VllmEngine(Policy(str(tiny_model)), replicas=[]).close()
    assert events == ["free", "wait for rank 0"]


def test_every_process_frees_memory_before_the_engine_of_the_first_wakes(monkeypatch):
    events = []
    monkeypatch.setattr(rollouts, "current_world", lambda: Processes(events))
    made = SimpleNamespace(load_weights=lambda version: events.append("load"), sleep=lambda: events.append("sleep"))
    manager = object.__new__(rollouts.RolloutManager)
    manager.lock, manager.sleepers, manager.engine, manager.agent = nullcontext(), [], made, None
    manager.policy = SimpleNamespace(version=1, release_cached_memory=lambda: events.append("free"))
    manager.renderer = manager.environment = manager.rollout = manager.scorer = None
    with manager.worker(SamplingRecipe()):
        events.append("play")
    assert events == ["free", "wait for all", "load", "play", "sleep", "wait for all"]
