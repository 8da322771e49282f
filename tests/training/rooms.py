"""Three rooms in a row: the number of letters in an answer selects the move, every turn has a reward, and the last room ends the episode."""

from posttrain.environments.protocol import Environment, Observation, Step
from posttrain.recipe.components import EnvironmentRecipe


class Rooms(Environment):
    """Random text moves through the rooms, so episodes have different numbers of turns and visit rooms repeatedly."""

    class Recipe(EnvironmentRecipe):
        """No additional keys."""

    def reset(self, seed):
        self.turn, self.room = 0, seed % 2
        return Observation(self._shown("You wake up."), f"room {self.room}")

    def step(self, action):
        self.turn += 1
        letters = len({c for c in action if c.isalpha()})
        self.room = (self.room + (0, 1, 1, 0, 2)[letters % 5]) if letters else 0
        out, over = self.room >= 2, self.turn == self.recipe.max_turns
        info = {"success": out} if out or over else {}
        reward = 0.1 * letters + (1.0 if out else 0.0)
        return Step(self._shown(f"Turn {self.turn}."), reward, out, over and not out, info, f"room {self.room}")

    def _shown(self, words):
        return [{"role": "user", "content": f"{words} You are in room {self.room}."}]
