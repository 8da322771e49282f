"""A made-up game of many turns whose history grows: every answer is answered with a drawing, whatever it says."""

from pydantic import Field

from posttrain.environments.protocol import Environment, Observation, Step
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.seeds import random_stream

_RULES = (
    "You walk over a frozen lake from square to square. Reach the goal G and keep off the holes O. You may slip. Think "
    "in a few words, then answer with one of Up, Down, Left and Right. The lake looks like this:\n"
)


class LongGameRecipe(EnvironmentRecipe):
    """Keys of the game."""

    size: int = Field(6, ge=2)
    """Rows and columns of the drawing."""


class LongGame(Environment):
    """Ends after `max_turns` turns; all episodes of a seed begin in the same way."""

    Recipe = LongGameRecipe

    def reset(self, seed: int) -> Observation:
        self._random = random_stream("long game", seed)
        self._turns = 0
        return Observation([{"role": "user", "content": _RULES + self._drawing()}])

    def step(self, action: str) -> Step:
        self._turns += 1
        over = self._turns >= self.recipe.max_turns
        text = f"You are not there yet. Turn {self._turns}.\n{self._drawing()}"
        return Step([] if over else [{"role": "user", "content": text}], 0.0, False, over, {"success": False})

    def _drawing(self) -> str:
        cells = self._random.choice(list("__O_P_G"), size=(self.recipe.size, self.recipe.size))
        return "\n".join(" ".join(row) for row in cells)
