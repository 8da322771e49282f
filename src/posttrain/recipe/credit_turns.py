"""Credit at the level of turns, for agents that are paid between their first answer and their last."""

from typing import Literal

from pydantic import Field

from posttrain.recipe.base import Part


class TurnReturnsCredit(Part):
    """Returns from each turn on."""

    type: Literal["turn_returns"]
    """`turn_returns`: discounted reward from the turn on, the same for all of its tokens."""
    discount: float = Field(1.0, gt=0, le=1)
    """Discount per turn, however long the answers are."""
    baseline: Literal["others", "none"] = "others"
    """`others`: minus the mean of what the other episodes of the group earned from that turn on, 0 where they had ended; unbiased. `none`: the raw return."""


class MtGrpoCredit(Part):
    """Group statistics of each turn's reward and of the outcome, which is what the last turn pays."""

    type: Literal["mt_grpo"]
    """`mt_grpo`: (o - mean) / std of the group's outcomes, in turns before the last plus `turn_weight` times the same of the group's rewards of that turn. For groups whose episodes all have the same number of turns."""
    turn_weight: float = Field(1.0, ge=0)
    """Weight of a turn's own reward beside the outcome, in the turns before the last."""


class GigpoCredit(Part):
    """Episodes compared with their group, and turns with those of the group that were played in the same state."""

    type: Literal["gigpo"]
    """`gigpo`: (R - mean) / std of the group's returns, plus `step_weight` times the same of the returns from the turn on among the group's turns in one state. States are told apart by the environment's name for them or, where it names none, by the tokens of the observation."""
    discount: float = Field(0.95, gt=0, le=1)
    """Discount per turn of the returns that are compared within a state."""
    step_weight: float = Field(1.0, ge=0)
    """omega: weight of the comparison within states."""
    divide: bool = True
    """Both comparisons are divided by their standard deviation; false is what its authors' code does unless told otherwise."""
