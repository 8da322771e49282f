"""Guess a number. After a wrong guess, the policy learns only whether it was too low or too high."""

from posttrain import Environment, EnvironmentRecipe, Observation, Step, random_stream


class GuessNumber(Environment):
    """Find a number between 1 and `highest`. Success is guessing it within `max_turns`."""

    class Recipe(EnvironmentRecipe):
        max_turns: int = 5
        highest: int = 31
        """The largest possible number."""

    def reset(self, seed: int) -> Observation:
        self.low, self.high, self.turns_left = 1, self.recipe.highest, self.recipe.max_turns
        self.number = int(random_stream("guess_number", seed).integers(1, self.high + 1))
        text = f"Guess my number from 1 to {self.high}. Answer with digits only."
        return Observation([{"role": "user", "content": text}])

    def step(self, action: str) -> Step:
        if self.turns_left == 0:
            raise RuntimeError("the episode is over; call reset")
        guess = int(action) if action.strip().isdecimal() else None
        correct = guess == self.number
        self.turns_left = 0 if correct else self.turns_left - 1
        if guess is None:
            hint, reward = "Digits only.", -0.1
        elif correct:
            hint, reward = "Right!", 1.0
        elif guess < self.number:
            hint, reward, self.low = "Too low.", 0.0, max(self.low, guess + 1)
        else:
            hint, reward, self.high = "Too high.", 0.0, min(self.high, guess - 1)
        truncated = self.turns_left == 0 and not correct
        info = {"success": correct} if correct or truncated else {}
        return Step([{"role": "user", "content": hint}], reward, correct, truncated, info)

    # Optional: the range of returns, the optimal policy, and a check of the environment without a model.

    @classmethod
    def return_range(cls, recipe: EnvironmentRecipe) -> tuple[float, float]:
        return -0.1 * recipe.max_turns, 1.0

    def expert(self) -> str:
        return str((self.low + self.high) // 2)

    @classmethod
    def validate(cls, recipe: EnvironmentRecipe, seeds) -> None:
        for seed in seeds:
            game = cls(recipe)
            game.reset(seed)
            assert game.step("0").reward == 0.0, f"seed {seed}: a wrong number has a reward"
            game.reset(seed)
            while not (step := game.step(game.expert())).terminated:
                assert not step.truncated, f"seed {seed}: bisection needs more than {recipe.max_turns} turns"
            assert step.reward == 1.0, f"seed {seed}: the reward of the right number is {step.reward}"
