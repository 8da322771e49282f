"""Credit assignment: from rewards to one advantage per sampled token."""

from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from posttrain.recipe.base import BaseConfig, Reads
from posttrain.recipe.model import Dtype, LoraRecipe, ModelRecipe, OptimizerRecipe
from posttrain.recipe.registry import Registry, Section

F = TypeVar("F", bound=Callable[..., Any])


class Credit(Section):
    """Keys that every credit has."""

    @cached_property
    def compared_with(self) -> Literal["group", "batch"] | None:
        """Where the baseline needs at least one other episode: in the episode's group, or in the batch. None: nowhere."""
        return None


class _ComparedInGroup(Credit):
    @cached_property
    def compared_with(self) -> Literal["group", "batch"] | None:
        return "group"


class TurnReturnsCredit(Credit):
    """Reward-to-go per turn."""

    type: Literal["turn_returns"]
    """`turn_returns`: discounted reward from the turn on, the same for all of its tokens."""
    discount: float = Field(1.0, gt=0, le=1)
    """Discount factor per turn, independent of the length of answers."""
    baseline: Literal["others", "none"] = "others"
    """`others`: subtract the mean reward-to-go of the group's other episodes at that turn (0 after their end); unbiased. `none`: no baseline."""

    @cached_property
    def compared_with(self) -> Literal["group", "batch"] | None:
        return "group" if self.baseline == "others" else None


class MtGrpoCredit(_ComparedInGroup):
    """Group-normalized turn rewards and outcome; the outcome is the reward of the last turn."""

    type: Literal["mt_grpo"]
    """`mt_grpo`: (o - mean) / std of the group's outcomes, in turns before the last plus `turn_weight` times the same of the group's rewards of that turn. For groups whose episodes all have the same number of turns."""
    turn_weight: float = Field(1.0, ge=0)
    """Weight of a turn's own reward relative to the outcome, in turns before the last."""


class GigpoCredit(_ComparedInGroup):
    """Episodes compared within their group, and turns with the group's turns in the same state."""

    type: Literal["gigpo"]
    """`gigpo`: (R - mean) / std of the group's returns, plus `step_weight` times the same of the returns from the turn on among the group's turns in one state. States are distinguished by the environment's state key or, without one, by the tokens of the observation."""
    discount: float = Field(0.95, gt=0, le=1)
    """Discount factor per turn of the returns compared within a state."""
    step_weight: float = Field(1.0, ge=0)
    """Weight (omega) of the comparison within states."""
    divide_by_std: bool = True
    """Divide both comparisons by their standard deviation. The default of the authors' code is false."""


class GroupCredit(Credit):
    """Group baselines: episodes of the same task are compared."""

    type: Literal["grpo", "dr_grpo", "rloo", "opo", "reinforce_pp_baseline", "remax", "maxrl"]
    """`grpo`: (R - mean) / std of the group. `dr_grpo`: R - mean. `rloo`: R - mean of the others. `opo`: R - length-weighted mean. `reinforce_pp_baseline`: R - mean, then whitened over the batch's tokens. `remax`: R - return of one greedy episode. `maxrl`: (R - mean) / mean, for returns of 0 or more."""

    @cached_property
    def compared_with(self) -> Literal["group", "batch"] | None:
        return None if self.type == "remax" else "group"

    @model_validator(mode="before")
    @classmethod
    def _returns_are_whole(cls, values: Any) -> Any:
        if isinstance(values, dict) and "discount" in values:
            raise ValueError(
                f"`discount` would have no effect: credit.type {values.get('type')} compares the returns of whole "
                "episodes; remove it, or use reinforce or gae"
            )
        return values


class PassAtKCredit(_ComparedInGroup):
    """The gain of each episode for the best of k attempts at its task."""

    type: Literal["pass_at_k"]
    """`pass_at_k`: the best return of k episodes of the group minus the best without this one, a mean over all sets of k with it."""
    k: int | None = Field(None, ge=2)
    """Number of attempts whose best return is maximized, at most `rollout.episodes_per_group`. Null: the size of the group, so only the single best episode gets credit."""


class GdpoCredit(_ComparedInGroup):
    """Several scores of an episode, each normalized within the group, then added and normalized over the batch."""

    type: Literal["gdpo"]
    """`gdpo`: sum of (score - mean) / std of the group for each score, then (sum - mean) / std of the batch."""
    weights: dict[str, float] | None = None
    """Weight of each score by name: those that the reward function or the environment reports, and `return` for the return with all penalties and the reward model's score. Null: 1 for each reported score but `score`, which is their combination."""


class TokenBaselineCredit(_ComparedInGroup):
    """Reward-to-go minus a baseline per token, which weights the group's returns by the norm of their gradients."""

    type: Literal["optimal_token_baseline"]
    """`optimal_token_baseline`: reward from the token on minus the mean of the group at that token, weighted by the energy of the tokens up to it. Costs one more forward pass per step."""


class BatchCredit(Credit):
    """Statistics of the whole batch, without groups."""

    type: Literal["brpo", "arpo"]
    """`brpo`: (R - mean) / std of the whole batch. `arpo`: the raw return."""

    @cached_property
    def compared_with(self) -> Literal["group", "batch"] | None:
        return "batch" if self.type == "brpo" else None


class TokenCredit(Credit):
    """Reward-to-go per token."""

    type: Literal["reinforce", "reinforce_pp"]
    """`reinforce`: discounted reward from the token on. `reinforce_pp`: the same, whitened over the batch's tokens."""
    discount: float = Field(1.0, gt=0, le=1)
    """Discount factor per sampled token."""


class ValueCredit(Credit):
    """Generalized advantage estimation with a critic."""

    type: Literal["gae"]
    """`gae`: generalized advantage estimation, as in PPO."""
    discount: float = Field(1.0, gt=0, le=1)
    """Discount factor (gamma) per sampled token."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """GAE lambda within the episode. 1: Monte Carlo returns. 0: one-step TD."""
    critic_lambda: float | None = Field(None, ge=0, le=1)
    """GAE lambda of the critic's targets. 1, as in VAPO: the targets are Monte Carlo returns for any lambda of the policy. Null: the lambda of the policy."""
    length_alpha: float | None = Field(None, gt=0)
    """Length-adaptive GAE lambda of VAPO: an episode of n sampled tokens has 1 - 1 / (length_alpha x n), at least 0, instead of `gae_lambda`. VAPO uses 0.05. Null: off."""
    whiten: bool = True
    """Normalize advantages to mean 0 and standard deviation 1 over the sampled tokens of the step."""

    @model_validator(mode="after")
    def _one_lambda(self):
        if self.length_alpha is not None and self.gae_lambda != type(self).model_fields["gae_lambda"].default:
            raise ValueError(
                "`length_alpha` sets the GAE lambda from the length; remove `gae_lambda` or `length_alpha`"
            )
        return self


class BilevelValueCredit(Credit):
    """Generalized advantage estimation on two levels, turns and tokens, with a critic."""

    type: Literal["bilevel_gae"]
    """`bilevel_gae`: GAE over turns, then over the tokens of each turn."""
    discount: float = Field(1.0, gt=0, le=1)
    """Discount factor per sampled token, within a turn."""
    turn_discount: float = Field(0.95, gt=0, le=1)
    """Discount factor per turn."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """GAE lambda within a turn. 1: Monte Carlo returns. 0: one-step TD."""
    turn_gae_lambda: float = Field(0.95, ge=0, le=1)
    """GAE lambda between turns."""
    whiten: bool = True
    """Normalize advantages to mean 0 and standard deviation 1 over the sampled tokens of the step."""


CriticCredit = ValueCredit | BilevelValueCredit
"""Credit types that need a critic."""

CREDITS = Registry("credit", "posttrain.credits", Credit)
"""Credits by `type`."""
CREDITS.build_in(
    GroupCredit,
    PassAtKCredit,
    GdpoCredit,
    TokenBaselineCredit,
    BatchCredit,
    TokenCredit,
    TurnReturnsCredit,
    MtGrpoCredit,
    GigpoCredit,
    ValueCredit,
    BilevelValueCredit,
)
CreditRecipe = Annotated[SerializeAsAny[Credit], BeforeValidator(CREDITS.validate)]


def register_credit(name: str) -> Callable[[F], F]:
    """Function decorator that adds a credit, which recipes choose with `credit.type: name`.

        @posttrain.register_credit("best_of_group")
        def best_of_group(returns, groups, *, scale: float = 1.0):
            best = {group: returns[groups == group].max() for group in groups}
            return scale * (returns - [best[group] for group in groups])

    Arguments are passed by the names of the function's parameters. For the N episodes of a step:

    - `returns` [N] float64: sum of each episode's rewards;
    - `groups` [N] int64: the group of each episode;
    - `lengths` [N] int64: its sampled tokens;
    - `rewards`: list of N arrays [n] float64, the rewards of its sampled tokens;
    - `episodes`: list of N `Episode`.

    It returns one advantage per episode, [N], or a list of N arrays [n], one advantage per sampled token. Its keyword-only
    parameters, which need type annotations, become keys of the `credit` section.

    Raises:
        ValueError: `name` is a built-in credit, or a parameter has a name that is not listed above.
    """

    def registered(function: F) -> F:
        CREDITS.add(name, function)
        return function

    return registered


class CriticRecipe(BaseConfig):
    """The critic: estimates the remaining return before each sampled token. Used by `gae` and `bilevel_gae`."""

    backbone: Literal["separate", "shared"] = "separate"
    """`separate`: a separate model with its own optimizer. `shared`: a value head, initialized to 0, on the policy's last hidden states; policy and value loss share one forward and backward pass and both change the backbone."""
    coefficient: float = Field(0.1, gt=0)
    """With `backbone: shared`: weight of the value loss. 0.1 is common for language models, 0.5 for control tasks."""
    path: Reads | None = None
    """With `backbone: separate`: initial weights. A language model (the value head is initialized to 0), or a reward model with its head, such as an export of `posttrain reward` (values are scaled as `reward.normalize: stored` scales rewards). It must have the policy's tokenizer. Null: `model.path`. In a pipeline, `stage:NAME`."""
    dtype: Dtype = None
    """With `backbone: separate`: precision of the critic. The value head always uses float32. Null: bfloat16 on a GPU, float32 on a CPU."""
    lora: LoraRecipe | None = None
    """With `backbone: separate`: LoRA adapters of the critic. Null: train all of its weights."""
    optimizer: OptimizerRecipe = OptimizerRecipe()
    """Optimizer of the critic; with `backbone: shared`, of the value head only."""
    updates_before_policy: int = Field(0, ge=0)
    """Critic warm-up: updates of the critic before the policy's first update. With `backbone: shared` only the value head is trained in them."""
    clip: float | None = Field(0.2, gt=0)
    """Clip range of the value loss, in units of reward, around the values before the step's updates. Null: off."""

    @model_validator(mode="after")
    def _keys_fit_the_trunk(self):
        if self.backbone == "separate":
            if self.coefficient != 0.1:
                raise ValueError(
                    "`critic.coefficient` weighs the value loss against the policy loss, which needs `critic.backbone: shared`; "
                    "remove it"
                )
            return self
        if self.path is not None:
            raise ValueError(
                "`critic.path` initializes a separate critic; with `critic.backbone: shared` "
                "the critic uses the policy's weights and its head starts at 0. Set `critic.backbone: separate`, or remove `critic.path`"
            )
        for key, default in (("dtype", None), ("lora", None)):
            if getattr(self, key) != default:
                raise ValueError(
                    f"`critic.{key}` has no effect with `critic.backbone: shared`, which uses the policy's weights; see `model.{key}`"
                )
        skipped = "max_skipped_updates"
        default = OptimizerRecipe.model_fields[skipped].default
        if not self.updates_before_policy and getattr(self.optimizer, skipped) != default:
            raise ValueError(
                f"`critic.optimizer.{skipped}` has no effect with `critic.backbone: shared` and no `updates_before_policy`: "
                f"the head is updated with the policy; see `optimizer.{skipped}`"
            )
        return self

    def model(self, policy: ModelRecipe) -> ModelRecipe:
        """The model section of a separate critic. Keys that it does not have come from the policy's `model`."""
        keys = {"path": self.path or policy.path, "dtype": self.dtype, "lora": self.lora, "load_in_4bit": False}
        return policy.model_copy(update=keys)
