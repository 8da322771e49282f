"""Losses of the stages that learn from comparisons: preference optimisation and reward models."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from posttrain.recipe.base import Part


class DpoLoss(Part):
    """Direct preference optimisation: a logistic loss of how much more the policy than the reference prefers chosen."""

    needs_reference: ClassVar[bool] = True

    type: Literal["dpo"] = "dpo"
    """`dpo`: direct preference optimisation."""
    beta: float = Field(0.1, gt=0)
    """Implicit reward per nat of the log-ratio to the reference: larger stays closer to the reference."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of pairs whose preference is taken to be the wrong way round."""


class CdpoLoss(Part):
    """Conservative direct preference optimisation: `dpo` for labels that are known to be noisy."""

    needs_reference: ClassVar[bool] = True

    type: Literal["cdpo"] = "cdpo"
    """`cdpo`: the loss of `dpo`, always with label smoothing."""
    beta: float = Field(0.1, gt=0)
    """Implicit reward per nat of the log-ratio to the reference: larger stays closer to the reference."""
    label_smoothing: float = Field(0.1, gt=0, lt=0.5)
    """Share of pairs whose preference is taken to be the wrong way round."""


class IpoLoss(Part):
    """Identity preference optimisation: a squared loss, which does not drive the log-ratios to infinity."""

    needs_reference: ClassVar[bool] = True

    type: Literal["ipo"] = "ipo"
    """`ipo`: identity preference optimisation, on log-ratios averaged over the tokens of the answer."""
    beta: float = Field(0.1, gt=0)
    """The paper's tau: the difference of the averaged log-ratios is steered to 1 / (2 beta)."""


class SimpoLoss(Part):
    """Simple preference optimisation: a logistic loss of length-averaged log-probabilities, without a reference."""

    needs_reference: ClassVar[bool] = False

    type: Literal["simpo"] = "simpo"
    """`simpo`: simple preference optimisation."""
    beta: float = Field(2.0, gt=0)
    """Implicit reward per nat of the answer's mean log-probability."""
    gamma: float = Field(1.0, ge=0)
    """Target margin between the implicit rewards, in their unit (after beta)."""


class KtoLoss(Part):
    """Kahneman-Tversky optimisation: single answers that are good or bad, against a common reference point."""

    needs_reference: ClassVar[bool] = True

    type: Literal["kto"] = "kto"
    """`kto`: Kahneman-Tversky optimisation; a pair counts as one good and one bad answer."""
    beta: float = Field(0.1, gt=0)
    """Implicit reward per nat of the log-ratio to the reference: larger stays closer to the reference."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of good answers."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of bad answers."""


class OrpoLoss(Part):
    """Odds ratio preference optimisation: supervised learning of chosen with a logistic term, without a reference."""

    needs_reference: ClassVar[bool] = False

    type: Literal["orpo"] = "orpo"
    """`orpo`: odds ratio preference optimisation."""
    beta: float = Field(0.1, gt=0)
    """The paper's lambda: weight of the odds-ratio term beside the supervised one."""


PairLossRecipe = DpoLoss | CdpoLoss | IpoLoss | SimpoLoss | OrpoLoss
"""Losses that compare the two answers of a pair."""

PreferenceLossRecipe = Annotated[PairLossRecipe | KtoLoss, Field(discriminator="type")]


class RewardLossRecipe(Part):
    """Loss of a reward model."""

    type: Literal["bradley_terry"] = "bradley_terry"
    """`bradley_terry`: the logistic loss of the difference of the two scores."""
    margin: bool = True
    """Whether the chosen score must lead by the number in the row's margin column; rows without one have 0."""
    centring: float = Field(0.0, ge=0)
    """Weight of the squared sum of the two scores, which pulls the mean score to 0."""
