"""A task with different rewards even for random text: many different letters, in three turns."""

from posttrain.environments.protocol import Environment, Observation, Step
from posttrain.recipe.components import EnvironmentRecipe


class Letters(Environment):
    """Each turn has a reward of 0.1 per different letter of the answer, and more on odd seeds."""

    class Recipe(EnvironmentRecipe):
        """No additional keys."""

    def reset(self, seed):
        self.turn, self.seed = 0, seed
        return Observation([{"role": "user", "content": f"Task {seed}: say many letters."}])

    def step(self, action):
        self.turn += 1
        letters = len({c for c in action if c.isalpha()})
        over = self.turn == self.recipe.max_turns
        reward = 0.1 * letters * (1 + self.seed % 2)
        return Step(
            [{"role": "user", "content": "More."}], reward, over, False, {"success": letters > 5} if over else {}
        )
