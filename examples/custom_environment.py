"""An environment of your own: guess a number in a few turns, with a hint after each guess.

`python examples/custom_environment.py` checks the environment without a model and trains on it for a few steps. The same
class works on the command line: `posttrain rl environment.type=examples/custom_environment.py:Guess`.
"""

import re
import sys

import posttrain


class Guess(posttrain.Environment):
    """Guess a number from 1 to `highest`. The reward is 1 for the right number."""

    class Recipe(posttrain.EnvironmentRecipe):
        """Keys of the `environment` section in a recipe."""

        max_turns: int = 3
        """Guesses."""
        highest: int = 7
        """The largest number."""

    def reset(self, seed: int) -> posttrain.Observation:
        self.number = 1 + seed % self.recipe.highest
        self.turns_left = self.recipe.max_turns
        rules = f"Guess my number. It is between 1 and {self.recipe.highest}. Answer with a number."
        return posttrain.Observation([{"role": "user", "content": rules}])

    def step(self, action: str) -> posttrain.Step:
        self.turns_left -= 1
        digits = re.search(r"\d+", action)
        guess = int(digits[0]) if digits else 0
        right = guess == self.number
        hint = [{"role": "user", "content": "It is higher." if guess < self.number else "It is lower."}]
        over = right or self.turns_left == 0
        info = {"success": right} if over else {}
        return posttrain.Step(hint, float(right), terminated=right, truncated=over and not right, info=info)

    def expert(self) -> str:
        return str(self.number)

    @classmethod
    def validate(cls, recipe, seeds) -> None:
        for seed in seeds:
            game = cls(recipe)
            game.reset(seed)
            assert game.step("0").reward == 0, f"seed {seed}: a wrong answer was rewarded"
            assert game.step(game.expert()).reward == 1, f"seed {seed}: the right answer was not rewarded"


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "packaged:smollm2-135m"
    env = posttrain.make_env(Guess, highest=7)
    Guess.validate(env.recipe, range(20))
    result = posttrain.rl(
        name="guess",
        steps=2,
        model={"path": model, "lora": {"rank": 8}},
        environment={"type": Guess, "highest": 7},
        rollout={"groups_per_step": 4, "episodes_per_group": 4, "tokens_per_turn": 4},
        evaluation={
            "every": 0,
            "seeds": {"start": 1_000_000, "count": 7},
            "final_seeds": {"start": 2_000_000, "count": 14},
        },
        overwrite=True,
    )
    for row in result.evaluation:
        print(f"{row['policy']}: success {row['success']:.0%}, n = {row['n']}")
