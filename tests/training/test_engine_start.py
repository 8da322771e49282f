"""An engine on the learner's GPU starts before the optimizer's state takes the memory that it needs."""

import pytest
from rich.console import Console

from posttrain.recipe.compose import load_recipe
from posttrain.runs.directory import RunDirectory
from posttrain.training import distill, rl, sft


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
