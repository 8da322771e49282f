"""The engine in a plan whose recipe names none."""

from io import StringIO

import torch
from rich.console import Console

from posttrain.cli.main import main
from posttrain.cli.stages import with_planned_engine
from posttrain.models import load
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.plan import DEVICES
from posttrain.training import stage


def test_a_plan_for_a_gpu_names_its_default_engine(capsys):
    note = "engine.type is local in this plan; with vLLM installed, a run on a GPU uses vLLM"

    def noted(*words):
        assert main(["rl", "environment.type=bandit", "--dry-run", *words]) == 0
        return note in " ".join(capsys.readouterr().out.split())

    assert noted("--on", "h100")
    assert not noted("--on", "h100", "engine.type=local")
    assert not noted("--on", "h100", "engine.type=vllm")
    assert not noted()


def test_a_plan_on_a_gpu_with_vllm_is_that_of_the_run(monkeypatch):
    monkeypatch.setattr(load, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(stage, "find_spec", lambda name: object())
    recipe = load_recipe([], ["environment.type=bandit", "hardware.processes=2"], "rl")
    out = StringIO()
    planned = with_planned_engine(recipe, DEVICES["h100"], Console(file=out, width=200))
    assert (planned.engine.type, planned.engine.servers) == ("vllm", 2)
    assert "engine.type is vllm" in out.getvalue()
    assert "engine.type is local" not in out.getvalue()
