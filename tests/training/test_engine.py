"""The engine of a recipe that names none, and its start while the learners leave it the GPU memory that it needs."""

import io
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import TypeAdapter
from rich.console import Console

from posttrain.distributed import world
from posttrain.distributed.launch import launch
from posttrain.engines.vllm import engine
from posttrain.models import load
from posttrain.models.policy import Policy
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.recipe.stages import Recipe
from posttrain.runs.directory import RunDirectory
from posttrain.training import distill, rl, rollouts, sft, stage


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU and vLLM."""
    monkeypatch.setattr(load, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(stage, "find_spec", lambda name: object())


def chosen(*words, kind="rl"):
    recipe = load_recipe([], ["environment.type=bandit", *words], kind)
    out = io.StringIO()
    return recipe, stage.with_engine(recipe, Console(file=out, width=200)), out.getvalue()


def test_vllm_samples_on_a_gpu_and_the_reason_is_printed(gpu):
    recipe, with_vllm, said = chosen("steps=3")
    assert with_vllm.engine.type == "vllm"
    assert with_vllm.model_copy(update={"engine": recipe.engine}) == recipe
    assert said.startswith("engine.type is vllm: vLLM is installed")


def test_every_process_has_a_server(gpu, monkeypatch):
    monkeypatch.setitem(world._state, "world", world.World(HardwareRecipe(), 0, 4, 0, 4))
    assert chosen()[1].engine.servers == 4
    monkeypatch.setitem(world._state, "world", world.World(HardwareRecipe(), 0, 8, 0, 4))
    recipe, same, said = chosen()
    assert same is recipe
    assert "set hardware.ray" in said


def test_the_local_engine_stays_where_it_is_set_or_needed(gpu, tmp_path, tiny_model):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tiny_model)}))
    for word, named in [
        ("engine.type=local", ""),
        ("engine.slots=4", "the recipe sets engine.slots; without that, vLLM is used"),
        (f"model.path={tmp_path}", "is an adapter"),
    ]:
        recipe, same, said = chosen(word)
        assert same is recipe
        assert named in said
        assert bool(said) == bool(named)


def test_without_a_gpu_or_vllm_the_engine_is_local(monkeypatch):
    recipe, same, said = chosen()
    assert (same is recipe, said) == (True, "")
    monkeypatch.setattr(load, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(stage, "find_spec", lambda name: None)
    recipe, same, said = chosen()
    assert same is recipe
    assert "install it, or set engine.type=vllm" in said


def test_launched_processes_choose_the_engine_for_their_device(gpu, monkeypatch, tmp_path):
    jobs = []

    def started(config, command):
        return lambda *arguments: jobs.append(json.loads((Path(arguments[-1]) / "job.json").read_text())["recipe"])

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", started)
    for words in ([], ["engine.type=local"]):
        launch(load_recipe([], ["environment.type=bandit", "hardware.processes=2", *words], "rl"), False, False)
    recipes = [TypeAdapter(Recipe).validate_python(job) for job in jobs]
    engines = [stage.with_engine(recipe, Console(file=io.StringIO())).engine.type for recipe in recipes]
    assert engines == ["vllm", "local"]


# -- its start -----------------------------------------------------------------------------------------------------------


class Started(Exception):
    """The engine starts."""


@pytest.mark.parametrize(
    ("kind", "module", "keys"),
    [
        ("rl", rl, []),
        ("distill", distill, ["teacher.policy=initial", "teacher.context=Think."]),
        ("sft", sft, ["experts.seeds.count=4"]),
    ],
)
def test_the_engine_starts_before_the_optimizer_is_made(kind, module, keys, tiny_model, tmp_path, monkeypatch):
    def started(*arguments, **named):
        raise Started

    def too_early(*arguments, **named):
        raise AssertionError("the optimizer's state exists before the engine")

    monkeypatch.setattr(module, "RolloutManager", started)
    monkeypatch.setattr(module, "Optimizer", too_early)
    recipe = load_recipe([], [*keys, "environment.type=bandit", f"model.path={tiny_model}", f"runs={tmp_path}"], kind)
    with pytest.raises(Started):
        module.train(recipe, RunDirectory.create(recipe, False), False, Console())


class Processes:
    """Two processes, of which this is the second; records when it waits for the other."""

    is_rank0, size, sharded = False, 2, True

    def __init__(self, events):
        self.events = events

    def on_rank0(self, work):
        self.events.append("wait for rank 0")

    def barrier(self):
        self.events.append("wait for all")


def test_every_process_waits_for_the_engine_of_the_first(tiny_policy, monkeypatch):
    """Before it allocates more, and before the engine wakes, it frees memory. Engines sleep before optimizers wake."""
    events = []
    for module in (engine, rollouts):
        monkeypatch.setattr(module, "current_world", lambda: Processes(events))
    monkeypatch.setattr(Policy, "release_cached_memory", lambda policy: events.append("free"))
    engine.VllmEngine(tiny_policy, replicas=[]).close()
    assert events == ["free", "wait for rank 0"]
    events.clear()
    made = SimpleNamespace(load_weights=lambda version: events.append("load"), sleep=lambda: events.append("sleep"))
    manager = object.__new__(rollouts.RolloutManager)
    manager.lock, manager.engine, manager.agent, manager.policy = nullcontext(), made, None, tiny_policy
    optimizer = [lambda what=what: events.append(f"optimizer {what}") for what in ("sleeps", "wakes")]
    manager.sleepers = [SimpleNamespace(sleep=optimizer[0], wake=optimizer[1])]
    manager.renderer = manager.environment = manager.rollout = manager.scorer = None
    with manager.worker(SamplingRecipe()):
        events.append("play")
    begun = ["optimizer sleeps", "free", "wait for all", "load"]
    assert events == [*begun, "play", "sleep", "wait for all", "optimizer wakes"]
