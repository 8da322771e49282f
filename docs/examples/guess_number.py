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
        return Observation(
            [{"role": "user", "content": f"Guess my number from 1 to {self.high}. Answer with digits only."}]
        )

    def step(self, action: str) -> Step:
        if self.turns_left == 0:
            raise RuntimeError("the episode is over; call reset")
        self.turns_left -= 1
        if not action.strip().isdecimal():
            return self._told("Digits only.", -0.1, won=False)
        guess = int(action)
        if guess < self.number:
            self.low = max(self.low, guess + 1)
            return self._told("Too low.", 0.0, won=False)
        if guess > self.number:
            self.high = min(self.high, guess - 1)
            return self._told("Too high.", 0.0, won=False)
        return self._told("Right!", 1.0, won=True)

    def _told(self, hint: str, reward: float, won: bool) -> Step:
        self.turns_left = 0 if won else self.turns_left
        truncated = self.turns_left == 0 and not won
        return Step(
            [{"role": "user", "content": hint}], reward, won, truncated, {"success": won} if won or truncated else {}
        )

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
