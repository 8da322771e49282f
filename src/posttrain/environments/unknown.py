"""Placeholder for an environment whose code is not imported, for commands that only read a run."""

from pydantic import ConfigDict

from posttrain.environments.protocol import Environment, Observation, Step
from posttrain.errors import InputError
from posttrain.recipe.components import EnvironmentRecipe


class Unknown(Environment):
    """An environment with any keys, which can be shown but not played."""

    class Recipe(EnvironmentRecipe):
        """All keys, as in the file."""

        model_config = ConfigDict(extra="allow")

        def other_tasks(self, other: EnvironmentRecipe) -> None:
            """None: which keys only score is known where the run is made."""

    def reset(self, seed: int) -> Observation:
        raise InputError(f"environment.type {self.recipe.type} is not imported by commands that only read a run")

    def step(self, action: str) -> Step:
        raise RuntimeError("the episode has not started; call reset")
