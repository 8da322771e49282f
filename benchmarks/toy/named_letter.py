"""A task for a model of 100,000 weights: name the letter that ends the prompt, behind three words that do not matter."""

from collections.abc import Sequence

from posttrain.environments.protocol import Baseline, Environment, Observation, Step
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.seeds import random_stream

LETTERS = "abcdefgh"
WORDS = ["arm", "dragon", "goal", "hole", "lake", "left", "phoenix", "reward", "right", "row", "round", "table", "turn"]
WORDS += ["up", "walk", "wall"]


class NamedLetter(Environment):
    """One turn; reward 1 for the right letter alone."""

    def reset(self, seed: int) -> Observation:
        draws = random_stream(seed, "named letter")
        self.letter = LETTERS[int(draws.integers(len(LETTERS)))]
        words = " ".join(str(word) for word in draws.choice(WORDS, 3))
        return Observation([{"role": "user", "content": f"{words} Name the letter: {self.letter}"}])

    def step(self, action: str) -> Step:
        right = action.strip() == self.letter
        return Step([], float(right), terminated=True, truncated=False, info={"success": right})

    def expert(self) -> str:
        return self.letter

    def random_answer(self, draw: float) -> str:
        return LETTERS[int(draw * len(LETTERS))]

    @classmethod
    def baselines(cls, recipe: EnvironmentRecipe, seeds: Sequence[int]) -> dict[str, Baseline]:
        chance = 1 / len(LETTERS)
        return {"random": Baseline(chance, chance, len(seeds)), "optimal": Baseline(1.0, 1.0, len(seeds))}
