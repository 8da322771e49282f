"""Guards that notice early when training collapses, and say what to change."""

import math
from dataclasses import dataclass
from typing import Any

from posttrain.recipe.run import GuardRecipe


@dataclass(frozen=True)
class _Guard:
    key: str
    """Name of the key in `GuardRecipe`; the value None disables the guard."""
    metric: str
    below: bool
    """Whether the guard fires below the threshold; otherwise above it."""
    meaning: str
    """The likely cause, and the settings to change."""


_GUARDS = (
    _Guard(
        "max_zero_groups",
        "credit/zero_groups",
        False,
        "all episodes of these groups end with the same return and give no signal; raise rollout.episodes_per_group or "
        "rollout.sampling.temperature, set rollout.filter.type=dynamic, or choose tasks that sometimes succeed",
    ),
    _Guard(
        "min_reward_spread",
        "reward/group_spread",
        True,
        "returns in a group hardly differ; raise rollout.sampling.temperature, or use tasks that sometimes succeed",
    ),
    _Guard(
        "min_entropy",
        "policy/entropy",
        True,
        "the policy has stopped exploring; lower optimizer.learning_rate, or set entropy.coefficient or kl.coefficient",
    ),
    _Guard(
        "max_gradient_norm",
        "optimizer/gradient_norm",
        False,
        "updates have become unstable; lower optimizer.learning_rate, or set optimizer.warmup_updates",
    ),
    _Guard(
        "max_repeated_share",
        "policy/repeated_share",
        False,
        "the policy repeats the same token; lower optimizer.learning_rate, or set kl.coefficient",
    ),
)


class Guards:
    """Counts, per guard, the consecutive steps beyond its threshold.

    The metrics are those of Wang et al. 2025, "RAGEN", arXiv 2504.20073: the spread of returns collapses first, then
    entropy, and gradient spikes mark the steps after which a run does not recover.
    """

    def __init__(self, recipe: GuardRecipe) -> None:
        self.recipe = recipe
        self._in_a_row = {guard.key: 0 for guard in _GUARDS}
        self._since = {guard.key: 0 for guard in _GUARDS}

    def check(self, metrics: dict[str, float], step: int) -> list[str]:
        """One sentence for each guard that fires at this step, usually none.

        A metric that is missing or NaN leaves the count unchanged. A guard fires at most once in `patience` steps.
        """
        fired = []
        for guard in _GUARDS:
            threshold, value = getattr(self.recipe, guard.key), metrics.get(guard.metric, math.nan)
            if threshold is None or math.isnan(value):
                continue
            beyond = value < threshold if guard.below else value > threshold
            if beyond and not self._in_a_row[guard.key]:
                self._since[guard.key] = step
            self._in_a_row[guard.key] = self._in_a_row[guard.key] + 1 if beyond else 0
            if beyond and self._in_a_row[guard.key] % self.recipe.patience == 0:
                side = "below" if guard.below else "above"
                fired.append(
                    f"{guard.metric} = {value:.4g} has been {side} guards.{guard.key} = {threshold:g} since step "
                    f"{self._since[guard.key]}: {guard.meaning}"
                )
        return fired

    def state_dict(self) -> dict[str, Any]:
        """The counts, and the steps at which they began."""
        return {"in_a_row": dict(self._in_a_row), "since": dict(self._since)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._in_a_row |= state["in_a_row"]
        self._since |= state["since"]
