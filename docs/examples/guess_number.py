"""Guess a number: the policy is told only whether its guess was too low or too high."""

from posttrain.environments.protocol import Environment, Observation, Step
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.seeds import random_stream


class GuessNumber(Environment):
    """Find a number by halving. Success is naming it in time."""

    class Recipe(EnvironmentRecipe):
        max_turns: int = 5
        highest: int = 31
        """The number lies between 1 and this."""

    def reset(self, seed: int) -> Observation:
        self.low, self.high, self.turns_left = 1, self.recipe.highest, self.recipe.max_turns
        self.number = int(random_stream("guess_number", seed).integers(1, self.high + 1))
        task = f"Guess my number from 1 to {self.high}. Answer with digits only."
        return Observation([{"role": "user", "content": task}])

    def step(self, action: str) -> Step:
        if self.turns_left == 0:
            raise RuntimeError("the episode is over; call reset")
        guess = int(action) if action.strip().isdecimal() else None
        won = guess == self.number
        self.turns_left = 0 if won else self.turns_left - 1
        if guess is None:
            hint = "Digits only."
        elif guess < self.number:
            hint, self.low = "Too low.", max(self.low, guess + 1)
        else:
            hint, self.high = "Right!" if won else "Too high.", min(self.high, guess if won else guess - 1)
        reward = 1.0 if won else -0.1 if guess is None else 0.0
        lost = self.turns_left == 0 and not won
        return Step([{"role": "user", "content": hint}], reward, won, lost, {"success": won} if won or lost else {})

    def expert(self) -> str:
        return str((self.low + self.high) // 2)

    @classmethod
    def validate(cls, recipe: EnvironmentRecipe, seeds) -> None:
        for seed in seeds:
            game = cls(recipe)
            game.reset(seed)
            assert game.step("0").reward == 0.0, f"seed {seed}: a wrong number was paid"
            game.reset(seed)
            while not (step := game.step(game.expert())).terminated:
                assert not step.truncated, f"seed {seed}: halving needs more than {recipe.max_turns} turns"
            assert step.reward == 1.0, f"seed {seed}: the right number was paid {step.reward}"
