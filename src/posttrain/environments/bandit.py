"""A two-armed bandit: a low-risk arm and a high-risk arm with the higher mean reward, described only by their names."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from posttrain.environments.game import FormatRecipe, Game, GameRecipe, play, require, require_sound
from posttrain.environments.protocol import Baseline
from posttrain.recipe.base import BaseConfig, Text
from posttrain.seeds import random_stream

_NAME = r"^\w[\w -]*$"


class LowRiskArm(BaseConfig):
    """The low-risk arm: its reward is normally distributed."""

    name: Text = Field("phoenix", pattern=_NAME)
    """The name in the prompt."""
    mean: float = 0.2
    """Mean reward."""
    std: float = Field(0.1, ge=0)
    """Standard deviation of the reward."""

    @property
    def expected(self) -> float:
        """Mean reward."""
        return self.mean


class HighRiskArm(BaseConfig):
    """The high-risk arm: its reward is normally distributed around one of two means."""

    name: Text = Field("dragon", pattern=_NAME)
    """The name in the prompt."""
    mean: float = 0.1
    """Mean reward without the jackpot."""
    jackpot: float = 1.0
    """Mean reward with the jackpot."""
    jackpot_probability: float = Field(0.25, ge=0, le=1)
    """Probability of the jackpot."""
    std: float = Field(0.1, ge=0)
    """Standard deviation of the reward around either mean."""

    @property
    def expected(self) -> float:
        """Mean reward over both cases."""
        return self.jackpot_probability * self.jackpot + (1 - self.jackpot_probability) * self.mean


class BanditRecipe(GameRecipe):
    """Keys of `bandit`."""

    type: Literal["bandit"] = "bandit"
    """The two-armed bandit."""
    format: FormatRecipe = FormatRecipe(prime=True)
    """How answers are written. They are started for the policy by default, so that an untrained model can learn."""
    max_turns: int = Field(1, ge=1)
    """Maximum number of turns; more than one allows another attempt after a rejected answer."""
    low_risk: LowRiskArm = LowRiskArm()
    high_risk: HighRiskArm = HighRiskArm()

    @model_validator(mode="after")
    def _has_a_better_arm(self) -> "BanditRecipe":
        if self.format.actions_per_turn > 1:
            raise ValueError("`format.actions_per_turn` must be 1, because one pull ends the episode")
        if self.low_risk.name.casefold() == self.high_risk.name.casefold():
            raise ValueError(f"`low_risk.name` and `high_risk.name` are both {self.low_risk.name!r}; rename one")
        if self.low_risk.expected == self.high_risk.expected:
            raise ValueError("`low_risk` and `high_risk` have the same mean reward; change a mean")
        return self


class Bandit(Game):
    """One pull of one of two named arms. Success is choosing the arm with the higher mean, not a high reward of this pull."""

    Recipe = BanditRecipe

    def _begin(self, seed: int) -> None:
        low, high = self.recipe.low_risk, self.recipe.high_risk
        draw = random_stream("bandit", seed, "pay")
        jackpot = draw.random() < high.jackpot_probability
        noise = draw.standard_normal(2)
        self._rewards = {
            low.name: low.mean + low.std * float(noise[0]),
            high.name: (high.jackpot if jackpot else high.mean) + high.std * float(noise[1]),
        }
        self._pulled: str | None = None
        swapped = random_stream("bandit", seed, "order").random() < 0.5
        self.actions = (high.name, low.name) if swapped else (low.name, high.name)

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
        """The penalty for a rejected answer, or an arm whose mean is less than four standard deviations above 0."""
        arms = (("low_risk", recipe.low_risk), ("high_risk", recipe.high_risk))
        below = [f"environment.{key}" for key, arm in arms if arm.mean < 4 * arm.std]
        return super().negative_rewards(recipe) or (below[0] if below else None)

    def _ended(self) -> bool:
        return self._pulled is not None

    def _succeeded(self) -> bool:
        return self._pulled == _better(self.recipe)

    def _plan(self) -> tuple[list[str], str]:
        better = _better(self.recipe)
        return [better], f"The {better} pays more on average."

    @classmethod
    def baselines(cls, recipe: BanditRecipe, seeds: Sequence[int]) -> dict[str, Baseline]:
        """Closed form: the random policy pulls the better arm half of the time. Returns are means over the arms' rewards."""
        means = (recipe.low_risk.expected, recipe.high_risk.expected)
        n = len(seeds)
        return {"random": Baseline(0.5, sum(means) / 2, n), "optimal": Baseline(1.0, max(means), n)}

    @classmethod
    def validate(cls, recipe: BanditRecipe, seeds: Sequence[int]) -> None:
        """The better arm succeeds, the other does not, and a repeated pull of the same seed pays the same."""
        environment = cls(recipe)
        worse = ({recipe.low_risk.name, recipe.high_risk.name} - {_better(recipe)}).pop()
        wrong = recipe.format.render([worse], "A wrong guess.")
        for seed in seeds:
            best, again, other = (
                play(environment, seed)[-1],
                play(environment, seed)[-1],
                play(environment, seed, [wrong])[-1],
            )
            require(best.terminated and best.info["success"] is True, seed, "the better arm does not count as success")
            require(other.terminated and other.info["success"] is False, seed, "the worse arm counts as success")
            require(best == again, seed, "the same pull paid differently")
            require_sound(environment, seed)


def _better(recipe: BanditRecipe) -> str:
    low, high = recipe.low_risk, recipe.high_risk
    return high.name if high.expected > low.expected else low.name
