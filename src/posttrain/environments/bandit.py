"""A two-armed bandit: one arm is steady, the other risky and better on average, and only their names tell which."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from posttrain.environments.answers import FormatRecipe
from posttrain.environments.game import Game, GameRecipe, play, require, require_sound
from posttrain.environments.protocol import Baseline
from posttrain.recipe.base import Part
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.seeds import random_stream

_NAME = r"^\w[\w -]*$"


class LowRiskArm(Part):
    """The steady arm: its pay is normal."""

    name: str = Field("phoenix", pattern=_NAME)
    """What the policy reads."""
    mean: float = 0.2
    """Mean pay."""
    std: float = Field(0.1, ge=0)
    """Standard deviation of the pay."""

    @property
    def expected(self) -> float:
        """Mean pay."""
        return self.mean


class HighRiskArm(Part):
    """The risky arm: its pay is normal around one of two means."""

    name: str = Field("dragon", pattern=_NAME)
    """What the policy reads."""
    mean: float = 0.1
    """Mean pay without the jackpot."""
    jackpot: float = 1.0
    """Mean pay with the jackpot."""
    jackpot_probability: float = Field(0.25, ge=0, le=1)
    """How often the jackpot is hit."""
    std: float = Field(0.1, ge=0)
    """Standard deviation of the pay around either mean."""

    @property
    def expected(self) -> float:
        """Mean pay over jackpot and no jackpot."""
        return self.jackpot_probability * self.jackpot + (1 - self.jackpot_probability) * self.mean


class BanditRecipe(GameRecipe):
    """Keys of `bandit`."""

    type: Literal["bandit"] = "bandit"
    """The two-armed bandit."""
    format: FormatRecipe = FormatRecipe(prime=True)
    """How answers are written; begun for the policy by default, so that a model without a warm-up can learn."""
    max_turns: int = Field(1, ge=1)
    """Turns until an arm must have been pulled; more than one allows another try after a rejected answer."""
    low_risk: LowRiskArm = LowRiskArm()
    high_risk: HighRiskArm = HighRiskArm()

    @model_validator(mode="after")
    def _can_be_won(self) -> "BanditRecipe":
        if self.format.actions_per_turn > 1:
            raise ValueError("`format.actions_per_turn` must be 1, for one pull ends the episode")
        if self.low_risk.name.casefold() == self.high_risk.name.casefold():
            raise ValueError(f"`low_risk.name` and `high_risk.name` are both {self.low_risk.name!r}; rename one")
        if self.low_risk.expected == self.high_risk.expected:
            raise ValueError("`low_risk` and `high_risk` pay the same on average, so neither is better; change a mean")
        return self


class Bandit(Game):
    """One pull of one of two named arms. Success is the arm with the higher mean pay, whatever it paid this time."""

    Recipe = BanditRecipe

    def _begin(self, seed: int) -> None:
        low, high = self.recipe.low_risk, self.recipe.high_risk
        draw = random_stream("bandit", seed, "pay")
        jackpot = draw.random() < high.jackpot_probability
        noise = draw.standard_normal(2)
        self._pay = {
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
            return f"{self._pulled} paid {self._pay[self._pulled]:.2f}."
        return f"The machines are {self.actions[0]} and {self.actions[1]}. Which one?"

    def _key(self) -> str:
        return self._pulled or "none pulled"

    def _act(self, name: str) -> float:
        self._pulled = name
        return self._pay[name]

    def _ended(self) -> bool:
        return self._pulled is not None

    def _succeeded(self) -> bool:
        return self._pulled == _better(self.recipe)

    def _plan(self) -> tuple[list[str], str]:
        better = _better(self.recipe)
        return [better], f"The {better} pays more on average."

    @classmethod
    def baselines(cls, recipe: EnvironmentRecipe, seeds: Sequence[int]) -> dict[str, Baseline]:
        """Closed form: half of the random pulls are of the better arm. Returns are means over the pay of the arms."""
        assert isinstance(recipe, BanditRecipe)
        means = (recipe.low_risk.expected, recipe.high_risk.expected)
        n = len(seeds)
        return {"random": Baseline(0.5, sum(means) / 2, n), "optimal": Baseline(1.0, max(means), n)}

    @classmethod
    def validate(cls, recipe: EnvironmentRecipe, seeds: Sequence[int]) -> None:
        """The better arm succeeds and the other one does not; each pays the same whenever the seed is played again."""
        assert isinstance(recipe, BanditRecipe)
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
