"""Credit: what turns rewards into one advantage per sampled token."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from posttrain.recipe.base import Part
from posttrain.recipe.credit_turns import GigpoCredit, MtGrpoCredit, TurnReturnsCredit


class GroupCredit(Part):
    """Baselines from the episodes of one task."""

    type: Literal["grpo", "dr_grpo", "rloo", "opo", "reinforce_pp_baseline", "remax"]
    """`grpo`: (R - mean) / std of the group. `dr_grpo`: R - mean. `rloo`: R - mean of the others. `opo`: R - length-weighted mean. `reinforce_pp_baseline`: R - mean, then whitened over the batch's tokens. `remax`: R - return of one greedy episode."""

    @model_validator(mode="before")
    @classmethod
    def _returns_are_whole(cls, values: Any) -> Any:
        if isinstance(values, dict) and "discount" in values:
            raise ValueError(
                f"`discount` would have no effect: credit.type {values.get('type')} compares the returns of whole "
                "episodes; remove it, or use reinforce or gae"
            )
        return values


class BatchCredit(Part):
    """Baselines without groups."""

    type: Literal["brpo", "arpo"]
    """`brpo`: (R - mean) / std of the whole batch. `arpo`: the raw return."""


class TokenCredit(Part):
    """Returns from each token on."""

    type: Literal["reinforce", "reinforce_pp"]
    """`reinforce`: discounted reward from the token on. `reinforce_pp`: the same, whitened over the batch's tokens."""
    discount: float = Field(1.0, gt=0, le=1)
    """Discount per sampled token."""


class ValueCredit(Part):
    """Advantages over the values of the critic."""

    type: Literal["gae"]
    """`gae`: generalised advantage estimation, the credit of PPO."""
    discount: float = Field(1.0, gt=0, le=1)
    """gamma: discount per sampled token."""
    trace_decay: float = Field(0.95, ge=0, le=1)
    """lambda: 1 takes the rewards that came, 0 the critic's word for all but the next; between, a mixture."""
    whiten: bool = True
    """Advantages minus their mean, over their standard deviation, both over the sampled tokens of the step."""


class BilevelValueCredit(Part):
    """Advantages over the values of the critic, of turns and, within a turn, of tokens."""

    type: Literal["bilevel_gae"]
    """`bilevel_gae`: generalised advantage estimation over turns, and over the tokens of each turn."""
    discount: float = Field(1.0, gt=0, le=1)
    """Discount per sampled token within a turn."""
    turn_discount: float = Field(0.95, gt=0, le=1)
    """Discount per turn."""
    trace_decay: float = Field(0.95, ge=0, le=1)
    """lambda within a turn: 1 takes the rewards that came, 0 the critic's word for all but the next."""
    turn_trace_decay: float = Field(0.95, ge=0, le=1)
    """lambda from turn to turn."""
    whiten: bool = True
    """Advantages minus their mean, over their standard deviation, both over the sampled tokens of the step."""


CriticCredit = ValueCredit | BilevelValueCredit
"""Credit that needs the values of a critic."""

CreditRecipe = Annotated[
    GroupCredit
    | BatchCredit
    | TokenCredit
    | TurnReturnsCredit
    | MtGrpoCredit
    | GigpoCredit
    | ValueCredit
    | BilevelValueCredit,
    Field(discriminator="type"),
]


class FilterRecipe(Part):
    """Which groups are worth an update."""

    type: Literal["none", "uncertainty", "dynamic"] = "none"
    """`none`; `uncertainty`: keep the groups with the largest spread of returns (StarPO-S); `dynamic`: keep groups whose returns differ and sample more tasks until the step is full (DAPO)."""
    keep: float = Field(0.25, gt=0, le=1)
    """`uncertainty`: share of the groups to keep."""
    max_rounds: int = Field(3, ge=1)
    """`dynamic`: how many rounds of sampling one step may take; after that it goes on with what it has and says so."""


class OverlongRecipe(Part):
    """DAPO's soft penalty on long answers: linear from 0 to -penalty over the last `buffer` tokens before `limit`."""

    limit: int = Field(ge=1)
    """Sampled tokens of an episode at which the penalty is whole."""
    buffer: int = Field(ge=1)
    """Tokens before the limit over which the penalty grows."""
    penalty: float = Field(1.0, gt=0)
    """The whole penalty."""
