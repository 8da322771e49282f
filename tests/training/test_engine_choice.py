"""The engine of a recipe that names none: vLLM on a GPU where it is installed, the local engine elsewhere."""

import io
import json
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter
from rich.console import Console

from posttrain.distributed import world
from posttrain.distributed.launch import launch
from posttrain.models import load
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.stages import Recipe
from posttrain.training import stage


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


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["engine.type=local"], ""),
        (["engine.slots=4"], "the recipe sets engine.slots; without that, vLLM is used"),
        (["model.path={adapter}"], "is an adapter"),
    ],
)
def test_the_local_engine_stays_where_it_is_set_or_needed(words, named, gpu, tmp_path, tiny_model):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tiny_model)}))
    recipe, same, said = chosen(*(word.format(adapter=tmp_path) for word in words))
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
    engines = []
    for job in jobs:
        recipe = TypeAdapter(Recipe).validate_python(job)
        engines.append(stage.with_engine(recipe, Console(file=io.StringIO())).engine.type)
    assert engines == ["vllm", "local"]
