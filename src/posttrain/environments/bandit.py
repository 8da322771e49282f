"""A two-armed bandit: a low-risk arm and a high-risk arm with the higher mean reward, described only by their names."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from posttrain.environments.game import FormatRecipe, Game, GameRecipe, play, require, require_sound
from posttrain.environments.protocol import Baseline
from posttrain.recipe.base import BaseConfig, Text
from posttrain.seeds import random_stream

LOW_MEAN, HIGH_MEAN, STD = 0.2, 0.1, 0.1
"""Mean reward of the low-risk arm, that of the high-risk arm without the jackpot, and the standard deviation of both."""
JACKPOT, JACKPOT_PROBABILITY = 1.0, 0.25
"""Mean reward of the high-risk arm with the jackpot, and its probability."""
BETTER_MEAN = JACKPOT_PROBABILITY * JACKPOT + (1 - JACKPOT_PROBABILITY) * HIGH_MEAN


class ArmRecipe(BaseConfig):
    """An arm of the bandit."""

    name: Text = Field(pattern=r"^\w[\w -]*$")
    """The name in the prompt."""


class BanditRecipe(GameRecipe):
    """Keys of `bandit`."""

    type: Literal["bandit"] = "bandit"
    """The two-armed bandit."""
    format: FormatRecipe = FormatRecipe(prime=True)
    """How answers are written. They are started for the policy by default, so that an untrained model can learn."""
    max_turns: int = Field(1, ge=1)
    """Maximum number of turns; more than one allows another attempt after a rejected answer."""
    low_risk: ArmRecipe = ArmRecipe(name="phoenix")
    """The arm whose reward is 0.2 on average."""
    high_risk: ArmRecipe = ArmRecipe(name="dragon")
    """The arm whose reward is 1 in a quarter of the pulls and else 0.1 on average; the better one."""

    def _check(self) -> None:
        if self.format.actions_per_turn > 1:
            raise ValueError("`format.actions_per_turn` must be 1, because one pull ends the episode")
        if self.low_risk.name.casefold() == self.high_risk.name.casefold():
            raise ValueError(f"`low_risk.name` and `high_risk.name` are both {self.low_risk.name!r}; rename one")


class Bandit(Game):
    """One pull of one of two named arms. Success is choosing the arm with the higher mean, not a high reward of this pull."""

    Recipe = BanditRecipe

    def _begin(self, seed: int) -> None:
        low, high = self.recipe.low_risk.name, self.recipe.high_risk.name
        draw = random_stream("bandit", seed, "pay")
        jackpot = draw.random() < JACKPOT_PROBABILITY
        noise = draw.standard_normal(2)
        self._rewards = {
            low: LOW_MEAN + STD * float(noise[0]),
            high: (JACKPOT if jackpot else HIGH_MEAN) + STD * float(noise[1]),
        }
        self._pulled: str | None = None
        swapped = random_stream("bandit", seed, "order").random() < 0.5
        self.actions = (high, low) if swapped else (low, high)

    def _rules(self) -> str:
        return (
            "Two slot machines pay differently, each in the way its name suggests. "
            "Pull the one that pays more on average."
        )

    def _state(self, first: bool) -> str:
        if self._pulled is not None:
            return f"{self._pulled} paid {self._rewards[self._pulled]:.2f}."
        return f"The machines are {self.actions[0]} and {self.actions[1]}. Which one?"

    def _key(self) -> str:
        return self._pulled or "none pulled"

    def _act(self, name: str) -> float:
        self._pulled = name
        return self._rewards[name]

    @classmethod
    def negative_rewards(cls, recipe: BanditRecipe) -> str | None:
        """The penalty for a rejected answer, or the arms, whose means are less than four standard deviations above 0."""
        return super().negative_rewards(recipe) or "environment.low_risk"

    def _status(self) -> tuple[bool, bool]:
        return self._pulled is not None, self._pulled == self.recipe.high_risk.name

    def _plan(self) -> tuple[list[str], str]:
        better = self.recipe.high_risk.name
        return [better], f"The {better} pays more on average."

    @classmethod
    def baselines(cls, recipe: BanditRecipe, seeds: Sequence[int]) -> dict[str, Baseline]:
        """Closed form: the random policy pulls the better arm half of the time. Returns are means over the arms' rewards."""
        n = len(seeds)
        random = Baseline(0.5, (LOW_MEAN + BETTER_MEAN) / 2, n)
        return {"random": random, "optimal": Baseline(1.0, BETTER_MEAN, n)}

    @classmethod
    def validate(cls, recipe: BanditRecipe, seeds: Sequence[int]) -> None:
        """The better arm succeeds, the other does not, and a repeated pull of the same seed pays the same."""
        environment = cls(recipe)
        wrong = recipe.format.render([recipe.low_risk.name], "A wrong guess.")
        for seed in seeds:
            best, again, other = (play(environment, seed, answers)[-1] for answers in (None, None, [wrong]))
            require(best.terminated and best.info["success"] is True, seed, "the better arm does not count as success")
            require(other.terminated and other.info["success"] is False, seed, "the worse arm counts as success")
            require(best == again, seed, "the same pull paid differently")
            require_sound(environment, seed)
