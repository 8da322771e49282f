"""A run of a custom environment file."""

from pathlib import Path

import pytest

from posttrain.recipe.stages import RlRecipe
from posttrain.runs.directory import RunDirectory

COIN = """
from posttrain.environments.protocol import Environment, Observation, Step
from posttrain.recipe.components import EnvironmentRecipe


class Coin(Environment):
    class Recipe(EnvironmentRecipe):
        sides: int = 2

    def reset(self, seed: int) -> Observation:
        return Observation([{"role": "user", "content": "heads?"}])

    def step(self, action: str) -> Step:
        return Step([], 1.0, True, False, {"success": True})
"""


@pytest.fixture
def recipe(tmp_path: Path) -> RlRecipe:
    file = tmp_path / "coin.py"
    file.write_text(COIN)
    return RlRecipe.model_validate(
        {
            "name": "tossing",
            "runs": str(tmp_path / "runs"),
            "environment": {"type": f"{file}:Coin", "sides": 3},
            "optimizer": {"learning_rate": 3e-06},
        }
    )


@pytest.fixture
def run(recipe: RlRecipe) -> RunDirectory:
    return RunDirectory.create(recipe)
