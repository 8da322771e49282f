"""Credit: what turns rewards into one advantage per sampled token."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from posttrain.recipe.base import BaseConfig
from posttrain.recipe.model import LoraRecipe, ModelRecipe, OptimizerRecipe


class TurnReturnsCredit(BaseConfig):
    """Returns from each turn on."""

    type: Literal["turn_returns"]
    """`turn_returns`: discounted reward from the turn on, the same for all of its tokens."""
    discount: float = Field(1.0, gt=0, le=1)
    """Discount per turn, however long the answers are."""
    baseline: Literal["others", "none"] = "others"
    """`others`: minus the mean of what the other episodes of the group earned from that turn on, 0 where they had ended; unbiased. `none`: the raw return."""


class MtGrpoCredit(BaseConfig):
    """Group statistics of each turn's reward and of the outcome, which is what the last turn pays."""

    type: Literal["mt_grpo"]
    """`mt_grpo`: (o - mean) / std of the group's outcomes, in turns before the last plus `turn_weight` times the same of the group's rewards of that turn. For groups whose episodes all have the same number of turns."""
    turn_weight: float = Field(1.0, ge=0)
    """Weight of a turn's own reward beside the outcome, in the turns before the last."""


class GigpoCredit(BaseConfig):
    """Episodes compared with their group, and turns with those of the group that were played in the same state."""

    type: Literal["gigpo"]
    """`gigpo`: (R - mean) / std of the group's returns, plus `step_weight` times the same of the returns from the turn on among the group's turns in one state. States are told apart by the environment's name for them or, where it names none, by the tokens of the observation."""
    discount: float = Field(0.95, gt=0, le=1)
    """Discount per turn of the returns that are compared within a state."""
    step_weight: float = Field(1.0, ge=0)
    """omega: weight of the comparison within states."""
    divide_by_std: bool = True
    """Both comparisons are divided by their standard deviation; false is what its authors' code does unless told otherwise."""


class GroupCredit(BaseConfig):
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


class BatchCredit(BaseConfig):
    """Baselines without groups."""

    type: Literal["brpo", "arpo"]
    """`brpo`: (R - mean) / std of the whole batch. `arpo`: the raw return."""


class TokenCredit(BaseConfig):
    """Returns from each token on."""

    type: Literal["reinforce", "reinforce_pp"]
    """`reinforce`: discounted reward from the token on. `reinforce_pp`: the same, whitened over the batch's tokens."""
    discount: float = Field(1.0, gt=0, le=1)
    """Discount per sampled token."""


class ValueCredit(BaseConfig):
    """Advantages over the values of the critic."""

    type: Literal["gae"]
    """`gae`: generalised advantage estimation, the credit of PPO."""
    discount: float = Field(1.0, gt=0, le=1)
    """gamma: discount per sampled token."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """lambda: 1 takes the rewards that came, 0 the critic's word for all but the next; between, a mixture."""
    whiten: bool = True
    """Advantages minus their mean, over their standard deviation, both over the sampled tokens of the step."""


class BilevelValueCredit(BaseConfig):
    """Advantages over the values of the critic, of turns and, within a turn, of tokens."""

    type: Literal["bilevel_gae"]
    """`bilevel_gae`: generalised advantage estimation over turns, and over the tokens of each turn."""
    discount: float = Field(1.0, gt=0, le=1)
    """Discount per sampled token within a turn."""
    turn_discount: float = Field(0.95, gt=0, le=1)
    """Discount per turn."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """lambda within a turn: 1 takes the rewards that came, 0 the critic's word for all but the next."""
    turn_gae_lambda: float = Field(0.95, ge=0, le=1)
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


class FilterRecipe(BaseConfig):
    """Which groups are worth an update."""

    type: Literal["none", "uncertainty", "dynamic"] = "none"
    """`none`; `uncertainty`: keep the groups with the largest spread of returns (StarPO-S); `dynamic`: keep groups whose returns differ and sample more tasks until the step is full (DAPO)."""
    keep: float = Field(0.25, gt=0, le=1)
    """`uncertainty`: share of the groups to keep."""
    max_rounds: int = Field(3, ge=1)
    """`dynamic`: how many rounds of sampling one step may take; after that it goes on with what it has and says so."""


class OverlongRecipe(BaseConfig):
    """DAPO's soft penalty on long answers: linear from 0 to -penalty over the last `buffer` tokens before `limit`."""

    limit: int = Field(ge=1)
    """Sampled tokens of an episode at which the penalty is whole."""
    buffer: int = Field(ge=1)
    """Tokens before the limit over which the penalty grows."""
    penalty: float = Field(1.0, gt=0)
    """The whole penalty."""


class CriticRecipe(BaseConfig):
    """What says before each sampled token what the episode will still earn. `gae` and `bilevel_gae` use it."""

    backbone: Literal["separate", "shared"] = "separate"
    """`separate`: a model of its own, with its own updates. `shared`: a head on the policy's last hidden states, which starts at 0; policy and value loss are one forward and backward pass, but each loss moves what the other reads."""
    coefficient: float = Field(0.1, gt=0)
    """Weight of the value loss beside the policy's loss, with `backbone: shared`. 0.1 is usual for language models; control tasks often take 0.5."""
    path: str | None = None
    """Where its weights start: a language model (its head then starts at 0), or a reward model with its head, as `posttrain reward` exports one (its values are then scaled as `reward.normalize: stored` scales rewards); it must have the policy's tokenizer. Null is `model.path`. In a pipeline, `stage:NAME`. For `backbone: separate`."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Precision of its weights in use, for `backbone: separate`; its head always computes in float32."""
    lora: LoraRecipe | None = None
    """Adapters of the critic; null trains all of its weights. For `backbone: separate`."""
    optimizer: OptimizerRecipe = OptimizerRecipe()
    """Of the critic's weights; with `backbone: shared` of its head alone, the trunk being the policy's to move."""
    updates_before_policy: int = Field(0, ge=0)
    """Updates in which the critic alone learns, before the policy's first (value warm-up); with `backbone: shared` only its head does."""
    clip: float | None = Field(0.2, gt=0)
    """Value loss: how far a value may move from the one before the step's updates and still gain, in units of reward; null is off."""

    @model_validator(mode="after")
    def _keys_fit_the_trunk(self):
        if self.backbone == "separate":
            if self.coefficient != 0.1:
                raise ValueError(
                    "`critic.coefficient` weighs the value loss against the policy's, which only `critic.backbone: shared` "
                    "joins; remove it"
                )
            return self
        if self.path is not None:
            raise ValueError(
                "`critic.path` starts a critic of its own weights, such as a reward model's; with `critic.backbone: shared` "
                "the weights are the policy's and the head starts at 0. Set `critic.backbone: separate`, or remove `critic.path`"
            )
        for key, default in (("dtype", "float32"), ("lora", None)):
            if getattr(self, key) != default:
                raise ValueError(
                    f"`critic.{key}` has no effect with `critic.backbone: shared`, whose trunk is the policy's: see `model.{key}`"
                )
        skipped = "max_skipped_updates"
        default = OptimizerRecipe.model_fields[skipped].default
        if not self.updates_before_policy and getattr(self.optimizer, skipped) != default:
            raise ValueError(
                f"`critic.optimizer.{skipped}` has no effect with `critic.backbone: shared` and no `updates_before_policy`: "
                f"the head's updates are the policy's, see `optimizer.{skipped}`"
            )
        return self

    def model(self, policy: ModelRecipe) -> ModelRecipe:
        """A critic of its own as a model; what is not said here is as in the policy's `model`."""
        own = {"path": self.path or policy.path, "dtype": self.dtype, "lora": self.lora}
        return policy.model_copy(update=own)
