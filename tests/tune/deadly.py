"""A letters task that can also end its process, or fail."""

import os
import signal

from posttrain.environments.protocol import Environment, Observation, Step
from posttrain.recipe.components import EnvironmentRecipe


class Deadly(Environment):
    """Rewards different letters, unless `end` stops it."""

    class Recipe(EnvironmentRecipe):
        """What happens on a training seed."""

        end: str = "none"
        """`none`, `kill` or `raise`."""
        pay: float = 1.0
        """Of every answer."""

    def reset(self, seed):
        if seed < 1000 and self.recipe.end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if seed < 1000 and self.recipe.end == "raise":
            raise MemoryError("no room left\nand more")
        return Observation([{"role": "user", "content": f"Task {seed}: say many letters."}])

    def step(self, action):
        letters = len({c for c in action if c.isalpha()})
        return Step([], self.recipe.pay * (1 + 0.01 * letters), True, False, {"success": True})
