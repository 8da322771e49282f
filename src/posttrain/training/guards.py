"""Collapse guards: they watch a step's metrics and say when training has gone wrong.

The signs are those of Wang et al. 2025, "RAGEN", arXiv 2504.20073: the spread of returns falls first, then entropy;
gradient spikes mark what does not come back.
"""

import math
from dataclasses import dataclass
from typing import Any

from posttrain.recipe.run import GuardRecipe


@dataclass(frozen=True)
class _Guard:
    key: str
    """Of `GuardRecipe`; None there switches the guard off."""
    metric: str
    below: bool
    """Fires below the threshold, or else above it."""
    meaning: str


_GUARDS = (
    _Guard(
        "min_reward_spread",
        "reward/group_spread",
        True,
        "the episodes of a group are all alike, so there is little to learn from",
    ),
    _Guard("min_entropy", "policy/entropy", True, "the policy has stopped exploring"),
    _Guard("max_gradient_norm", "optimizer/gradient_norm", False, "updates have become unstable"),
    _Guard("max_repeated_share", "policy/repeated_share", False, "the policy repeats the same token"),
)


class Guards:
    """Counts, per guard, the steps in a row beyond its threshold."""

    def __init__(self, recipe: GuardRecipe) -> None:
        self.recipe = recipe
        self._in_a_row = {guard.key: 0 for guard in _GUARDS}

    def check(self, metrics: dict[str, float]) -> list[str]:
        """One sentence for each guard that fires at this step, usually none.

        A metric that is missing or NaN is no evidence and leaves the count as it is. A guard that has fired counts
        anew, so it speaks again every `patience` steps.
        """
        fired = []
        for guard in _GUARDS:
            threshold, value = getattr(self.recipe, guard.key), metrics.get(guard.metric, math.nan)
            if threshold is None or math.isnan(value):
                continue
            beyond = value < threshold if guard.below else value > threshold
            self._in_a_row[guard.key] = self._in_a_row[guard.key] + 1 if beyond else 0
            if self._in_a_row[guard.key] >= self.recipe.patience:
                self._in_a_row[guard.key] = 0
                fired.append(self._sentence(guard, value, threshold))
        return fired

    def _sentence(self, guard: _Guard, value: float, threshold: float) -> str:
        side = "below" if guard.below else "above"
        steps = "1 step" if self.recipe.patience == 1 else f"{self.recipe.patience} steps in a row"
        return f"{guard.metric} = {value:.4g} has been {side} guards.{guard.key} = {threshold:g} for {steps}: {guard.meaning}"

    def state_dict(self) -> dict[str, Any]:
        """The counts."""
        return {"in_a_row": dict(self._in_a_row)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._in_a_row = dict(state["in_a_row"])
