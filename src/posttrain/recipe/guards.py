"""The guards: metrics of training steps that show a collapse, their thresholds, the probable cause and the key to change."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from posttrain.recipe.base import BaseConfig
from posttrain.recipe.needs import advised

SOLVED = 0.9
"""Share of a step's episodes. If as many succeed, equal returns and equal answers show that the tasks are learned."""

OFF_POLICY = ("learner.epochs_per_step", "learner.updates_per_step", "optimizer.learning_rate")
"""Keys of how far the updates of a step move the policy from the one that sampled."""

BROKEN = ("the first step was far from it and had a higher return, so updates are too large", OFF_POLICY[-1:])
"""Cause and key of a policy that training has broken."""


@dataclass(frozen=True)
class Guard:
    """One metric of training steps and the values that show a collapse."""

    key: str
    """Its name in `GuardRecipe.thresholds`."""
    metric: str
    threshold: float
    """The default."""
    cause: str
    """The most probable cause."""
    keys: tuple[str, ...] = ()
    """Keys of `CHANGES`, of which the first that has an effect in the recipe is advised."""
    otherwise: str = ""
    """What to do instead."""
    below: bool = False
    """Whether the guard fires below the threshold; otherwise above it."""
    unless_solved: bool = False
    """Whether the values are usual where nearly all episodes succeed."""
    lost: bool = False
    """Whether updates that are too large cause it in runs that begin far within the threshold and lose return."""
    per: str | None = None
    """The metric that divides `metric`."""
    times: float | None = None
    """The value must also be above so many times that of the run's first step, because some tasks begin with such values and
    only a rise is a collapse. None: the first step does not matter."""

    def value(self, metrics: Mapping[str, float]) -> float:
        """The guarded value of a step; NaN if it has none."""
        value = metrics.get(self.metric, math.nan)
        return value if self.per is None else value / metrics.get(self.per, math.nan)

    def beyond(self, metrics: Mapping[str, float], threshold: float, first: float = math.nan) -> bool:
        """Whether a step is beyond `threshold`, which a solved task excuses if `unless_solved`. `first`: the value of the
        run's first step, if it is known."""
        value = self.value(metrics)
        if self.unless_solved and metrics.get("rollout/success", 0.0) >= SOLVED:
            return False
        if self.times is not None and math.isfinite(first):
            threshold = max(threshold, first * self.times)
        return value < threshold if self.below else value > threshold

    def sentence(
        self, recipe: Any, value: float, threshold: float, since: str, first: float = math.nan, fell: bool = False
    ) -> str:
        """The message about a `value` that has been beyond `threshold` `since` some step of a run of `recipe`. `first` as for
        `beyond`; `fell`: whether the return has fallen since the first step."""
        began = first > 2 * threshold if self.below else first < threshold / 2
        broken = self.lost and began and fell
        cause, keys = BROKEN if broken else (self.cause, self.keys)
        change, otherwise = advised(recipe, *keys), "" if broken else self.otherwise
        remedy = ", or ".join(filter(None, (f"set {change}" * bool(change), otherwise)))
        name = self.metric if self.per is None else f"{self.metric} per {self.per}"
        return (
            f"{name} = {value:.4g} has been {'below' if self.below else 'above'} guards.thresholds.{self.key} = "
            f"{threshold:g} {since}: {cause}; {remedy}"
        )


RATE = ("optimizer.learning_rate",)
VARIETY = ("rollout.sampling.temperature", "rollout.episodes_per_group")
FAILURES = ("rollout.failures.action", "rollout.failures.retries")
EQUAL_ANSWERS = ("rollout.sampling.temperature", "kl.coefficient", "optimizer.learning_rate")

GUARDS = (
    Guard(
        "max_zero_groups",
        "credit/zero_groups",
        0.8,
        "all episodes of these groups end with the same return and give no signal",
        VARIETY,
        "choose tasks that sometimes succeed and sometimes fail",
        unless_solved=True,
        lost=True,
    ),
    Guard(
        "min_reward_spread",
        "reward/group_spread",
        1e-6,
        "returns in a group hardly differ",
        VARIETY,
        "let the reward tell answers apart",
        below=True,
        unless_solved=True,
        lost=True,
    ),
    Guard(
        "min_entropy", "policy/entropy", 0.02, "the policy has stopped exploring", RATE, below=True, unless_solved=True
    ),
    Guard("max_gradient_norm", "optimizer/gradient_norm", 10.0, "updates have become unstable", RATE, times=10.0),
    Guard("max_repeated_share", "policy/repeated_share", 0.2, "the policy repeats the same token", RATE, times=1.5),
    Guard(
        "max_same_answers",
        "rollout/same_answer_share",
        0.99,
        "the policy gives one answer to all tasks",
        EQUAL_ANSWERS,
        unless_solved=True,
        lost=True,
    ),
    Guard(
        "max_truncated",
        "rollout/truncated_share",
        0.5,
        "answers run to the limit on tokens",
        ("rollout.missing_eos_penalty", "rollout.tokens_per_turn"),
        times=1.5,
        lost=True,
    ),
    Guard(
        "max_rejected",
        "rollout/rejected_share",
        0.5,
        "the environment cannot parse the answers",
        otherwise="fine-tune model.path on answers of its form first, or correct its parser",
        lost=True,
    ),
    Guard(
        "max_ratio_kl",
        "policy/kl_rollout_k3",
        0.1,
        "the updates of a step move the policy far from the one that sampled",
        OFF_POLICY,
    ),
    Guard(
        "max_failed",
        "rollout/failed",
        0.1,
        "the environment or its reward fails",
        FAILURES,
        "correct it",
        per="rollout/episodes",
    ),
)
"""Thresholds are chosen and measured by `benchmarks/guards.py`, see docs/results/guards.md."""
_Keys: Any = Literal[tuple(guard.key for guard in GUARDS)]
Thresholds = dict[_Keys, Annotated[float, Field(ge=0)] | None]
_DEFAULTS: Thresholds = {guard.key: guard.threshold for guard in GUARDS}


class AlarmRecipe(BaseConfig):
    """What a run does at an alarm."""

    action: Literal["warn", "stop"] = "warn"
    """`warn`: log a warning. `stop`: end the run, also when it is resumed, and keep the last good checkpoint."""


class GuardRecipe(AlarmRecipe):
    """Collapse detection. A guard triggers after `patience` consecutive steps beyond its threshold."""

    defaults: ClassVar[Thresholds] = _DEFAULTS

    patience: int = Field(5, ge=1)
    """Consecutive steps beyond a threshold before a guard triggers."""
    thresholds: Thresholds = Field(_DEFAULTS, validate_default=True)
    """Threshold of each guard; null: off. `max_zero_groups`: share of groups without credit, because all their episodes have the same return. `min_reward_spread`: mean standard deviation of returns within groups. `min_entropy`: mean entropy at sampled tokens, in nats. `max_gradient_norm`: before clipping; it must also be 10 times that of the first step. `max_repeated_share`: share of sampled tokens that repeat the token before them; it must also be 1.5 times that of the first step. `max_same_answers`: share of the most frequent answer. `max_truncated`: share of answers that a limit on tokens ended; it must also be 1.5 times that of the first step. `max_rejected`: share of answers that the environment cannot parse. `max_ratio_kl`: policy/kl_rollout_k3, nats per token. `max_failed`: share of failed episodes."""

    @field_validator("thresholds", mode="after")
    @classmethod
    def _with_defaults(cls, value: Thresholds) -> Thresholds:
        return {**cls.defaults, **value}


_TAUGHT: Thresholds = {**_DEFAULTS, "min_reward_spread": None, "min_entropy": None, "max_same_answers": None}


class TaughtGuardRecipe(GuardRecipe):
    """Collapse detection where a teacher trains the policy, so that returns, entropy and answers are as it decides."""

    defaults: ClassVar[Thresholds] = _TAUGHT

    thresholds: Thresholds = Field(_TAUGHT, validate_default=True)
    """As in `rl`; null: off."""
