"""Credit of units: what each unit of an answer did for the reward of the whole, by what the reward model says."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from posttrain.recipe.base import Part
from posttrain.recipe.units import StepUnits, UnitsRecipe


class _Mixed(Part):
    beta: float = Field(0.8, ge=0, le=1)
    """Share of the units' credit; the rest is credit of the outcome. 0 measures the credit of units and learns from the outcome alone."""


class _Read(_Mixed):
    segmenter: UnitsRecipe = StepUnits(type="steps")
    """What cuts answers into units. `entropy` measures under the policy's reference, its frozen start."""


class _Placed(Part):
    placement: Literal["end", "even"] = "end"
    """Where in a unit its reward arrives. `end`: at its last token. `even`: the same share at each of its tokens, of which the later ones then see only a part."""


class _Standardised(Part):
    statistics: Literal["batch", "group"] = "batch"
    """Credits are standardised over the units of the whole step, or of each group."""
    clip: float = Field(5.0, gt=0)
    """Standardised credits are clipped to [-clip, clip]."""


class _Probed(Part):
    probe: Literal["one_pass", "separate"] = "one_pass"
    """`one_pass`: the values after all units of an answer in one forward pass of the reward model. `separate`: a pass for each; the same numbers, for models in which one pass does not work."""


class PrefixCredit(_Probed, _Placed, _Read):
    """What the reward model's word rose by with each unit. A reward stream: the sum over units is the outcome minus the value of an empty answer."""

    type: Literal["prefix"]
    """`prefix`: value of the answer after the unit - value before it."""


class ShareCredit(_Placed, _Read):
    """The outcome divided among units. Reward streams that sum to the outcome."""

    type: Literal["even", "outcome", "attention"]
    """`even`: the same for each unit. `outcome`: all to the last. `attention`: by the attention that the reward model's last layer pays to each unit where it reads the reward (ABC)."""


class LearnedCredit(_Placed, _Mixed):
    """The rewards of a unit-level reward model, whose own units are used. A reward stream."""

    type: Literal["unit_rewards"]
    """`unit_rewards`: what a reward model trained with `units` says of each unit."""
    beta: float = Field(1.0, ge=0, le=1)
    """Share of the units' rewards; the rest is their mean, as a reward of the outcome."""
    normaliser: str | None = None
    """`params.json` of `posttrain fit-normalizer`, or the run it was made for; in a pipeline, `stage:NAME`. Rewards are then normalised by where their unit stands. null: by `reward.normalise`, the same for all places."""
    fit: str | None = Field(None, pattern=r"^[^>]+(>[^>]+){4}$")
    """Which fit of the file, as `model > dataset > method > aggregate > threshold`; not needed where there is only one."""

    @model_validator(mode="after")
    def _fit_of_a_file(self) -> "LearnedCredit":
        if self.fit is not None and self.normaliser is None:
            raise ValueError("`fit` names a fit of `normaliser`, which is not given; set it, or remove `fit`")
        return self


class TruncationCredit(_Probed, _Standardised, _Read):
    """What was still to come when the unit began. An advantage."""

    type: Literal["trunc"]
    """`trunc`: outcome - value of the answer up to the unit."""


class _Rendered(Part):
    rendering: Literal["delete", "placeholder", "blank"] = "delete"
    """How an answer is read without a unit. `delete`: its tokens are left out. `placeholder`: `[omitted]` stands for them. `blank`: as many spaces."""


class LeaveOneOutCredit(_Rendered, _Standardised, _Read):
    """What the answer lacks without the unit. An advantage; units that can stand in for each other get nothing."""

    type: Literal["loo"]
    """`loo`: outcome - value of the answer without the unit."""


class ShapleyCredit(_Rendered, _Standardised, _Read):
    """The mean of what a unit adds, over the orders in which units may join. An advantage that sums to the outcome minus the value of an empty answer."""

    type: Literal["shapley"]
    """`shapley`: Shapley values, exact where that costs no more than the permutations."""
    permutations: int = Field(8, ge=2)
    """Sampled orders, half of them the other half backwards."""


class CompatibleCredit(_Read):
    """The published DRCA, for comparison: `trunc` over blanks, paid as a reward though it is an advantage, so that later units are paid again and again."""

    type: Literal["seed_compat"]
    """`seed_compat`: the published DRCA."""
    beta: float = Field(0.8, ge=0, le=1)
    """Share of the units' credit; the rest is the outcome's, at the last token."""


CausalCredit = PrefixCredit | ShareCredit | LearnedCredit | CompatibleCredit
"""Credit that is a reward stream."""
HindsightCredit = TruncationCredit | LeaveOneOutCredit | ShapleyCredit
"""Credit that is an advantage."""

UnitCreditRecipe = Annotated[
    PrefixCredit
    | ShareCredit
    | LearnedCredit
    | TruncationCredit
    | LeaveOneOutCredit
    | ShapleyCredit
    | CompatibleCredit,
    Field(discriminator="type"),
]
