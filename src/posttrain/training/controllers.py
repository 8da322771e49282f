"""Controllers of the KL and entropy coefficients, and guards against collapse: what follows the metrics of a step.

Guards notice early when training collapses, and say what to change.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.errors import RunError
from posttrain.models.gate import tolerance
from posttrain.models.load import resolve_dtype
from posttrain.recipe.loss import KL_STEP, EntropyRecipe, KlRecipe
from posttrain.recipe.run import Guard, GuardRecipe, SampledRecipe


class KlController:
    """The KL coefficient: fixed, or adapted to a target.

    Adaptive: e = clip(KL / target - 1, -s, s) with s = `KL_STEP`, coefficient x (1 + e n / horizon) after n episodes; n
    is capped at one horizon, so one update changes the coefficient by at most a factor s. Source: Ziegler et al. 2019.
    """

    def __init__(self, recipe: KlRecipe) -> None:
        self.recipe = recipe
        self.coefficient = recipe.coefficient

    def update(self, kl: float | None, episodes: int) -> None:
        """Adapt to `kl`, the measured KL per token in nats. None or a value that is not finite changes nothing."""
        if self.recipe.target is None or kl is None or not math.isfinite(kl):
            return
        error = min(max(kl / self.recipe.target - 1, -KL_STEP), KL_STEP)
        self.coefficient *= 1 + error * min(episodes / self.recipe.horizon, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """The current coefficient."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.coefficient = state["coefficient"]


class EntropyController:
    """The coefficient of the entropy bonus: fixed, or adapted to a target.

    Adaptive: after each step with entropy H, c becomes c + `step` if H < target, else c - `step`, within 0 and
    `max_coefficient`. The bonus of the next step has the coefficient c if H <= target, else 0. Source: He et al. 2025,
    "Skywork open reasoner 1", arXiv 2505.22312, section 4 (adaptive entropy control), where H is measured before the
    update.
    """

    def __init__(self, recipe: EntropyRecipe) -> None:
        self.recipe = recipe
        self.used = recipe.has_bonus
        """Whether the bonus ever has a coefficient above 0."""
        self._adapted = recipe.coefficient
        self._below = True

    @property
    def coefficient(self) -> float:
        """The coefficient of the next step's bonus."""
        return self._adapted if self._below else 0.0

    def update(self, entropy: float | None) -> None:
        """Adapt to `entropy`, the measured entropy per token in nats. None or a value that is not finite changes
        nothing.
        """
        target = self.recipe.target
        if target is None or entropy is None or not math.isfinite(entropy):
            return
        change = self.recipe.step if entropy < target else -self.recipe.step
        self._adapted = min(max(self._adapted + change, 0.0), self.recipe.max_coefficient)
        self._below = entropy <= target

    def update_from(self, metrics: Mapping[str, float]) -> None:
        """Adapt to the entropy of the tokens that get the bonus, taken from a step's `metrics`. No effect if it is
        missing.
        """
        self.update(metrics.get("policy/entropy" if self.recipe.tokens == "all" else "policy/bonus_entropy"))

    def state_dict(self) -> dict[str, Any]:
        """The adapted coefficient, and whether the last entropy was at most the target."""
        return {"coefficient": self._adapted, "below": self._below}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._adapted, self._below = state["coefficient"], state["below"]


SOLVED = 0.9
"""Share of a step's episodes. If as many succeed, groups without signal show that the tasks are learned."""


@dataclass(frozen=True)
class _Guard:
    key: Guard
    """Its name in `GuardRecipe.thresholds`."""
    metric: str
    below: bool
    """Whether the guard fires below the threshold; otherwise above it."""
    meaning: str
    """The likely cause, and the settings to change."""
    of_returns: bool = False
    """Whether it compares returns within groups. They also agree where nearly all episodes succeed, which is no collapse."""


_GUARDS = (
    _Guard(
        "max_zero_groups",
        "credit/zero_groups",
        False,
        "all episodes of these groups end with the same return and give no signal; raise rollout.episodes_per_group or "
        "rollout.sampling.temperature, set rollout.filter.type=dynamic, or choose tasks that sometimes succeed and "
        "sometimes fail",
        of_returns=True,
    ),
    _Guard(
        "min_reward_spread",
        "reward/group_spread",
        True,
        "returns in a group hardly differ; raise rollout.sampling.temperature, or use tasks that sometimes succeed and "
        "sometimes fail",
        of_returns=True,
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
        self.stopped = False
        """Whether a guard has ended the run."""
        self._in_a_row = {guard.key: 0 for guard in _GUARDS}
        self._since = {guard.key: 0 for guard in _GUARDS}

    def check(self, metrics: dict[str, float], step: int) -> list[str]:
        """One sentence for each guard that fires at this step, usually none.

        A metric that is missing or NaN leaves the count unchanged. A guard fires at most once in `patience` steps. Guards
        of returns end their count at a step in which at least `SOLVED` of the episodes succeed.
        """
        fired = []
        solved = metrics.get("rollout/success", 0.0) >= SOLVED
        for guard in _GUARDS:
            threshold, value = self.recipe.thresholds.get(guard.key), metrics.get(guard.metric, math.nan)
            if threshold is None or math.isnan(value):
                continue
            beyond = (value < threshold if guard.below else value > threshold) and not (guard.of_returns and solved)
            if beyond and not self._in_a_row[guard.key]:
                self._since[guard.key] = step
            self._in_a_row[guard.key] = self._in_a_row[guard.key] + 1 if beyond else 0
            if beyond and self._in_a_row[guard.key] % self.recipe.patience == 0:
                side = "below" if guard.below else "above"
                fired.append(
                    f"{guard.metric} = {value:.4g} has been {side} guards.thresholds.{guard.key} = {threshold:g} since step "
                    f"{self._since[guard.key]}: {guard.meaning}"
                )
        self.stopped = bool(fired) and self.recipe.action == "stop"
        return fired

    def state_dict(self) -> dict[str, Any]:
        """The counts, the steps at which they began, and whether a guard has ended the run."""
        return {"in_a_row": dict(self._in_a_row), "since": dict(self._since), "stopped": self.stopped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._in_a_row |= state["in_a_row"]
        self._since |= state["since"]
        self.stopped = state.get("stopped", False)


def mismatch_limit(recipe: SampledRecipe, device: torch.device) -> float:
    """The largest `policy/mismatch`, in nats, that the arithmetic of the recipe's engine and learner explains.

    `device`: the learner's. Infinite where engine and learner differ on purpose: by newer weights, adapter dropout, or
    log-probabilities after truncation.
    """
    sampling, lora, local = recipe.rollout.sampling, recipe.model.lora, recipe.engine.type == "local"
    truncated = not local and (sampling.top_p < 1 or sampling.top_k or sampling.min_p > 0)
    if recipe.rollout.async_rollouts > 0 or truncated or (lora is not None and lora.dropout > 0):
        return math.inf
    dtype = resolve_dtype(recipe.model.dtype, device)
    return tolerance(dtype if local else torch.bfloat16)


def check_mismatch(metrics: Mapping[str, float], limit: float, step: int) -> None:
    """RunError if the engine's log-probabilities differ from the learner's by more than `limit` nats per token."""
    mismatch = metrics.get("policy/mismatch", 0.0)
    if not mismatch <= limit:
        raise RunError(
            f"step {step}: policy/mismatch is {mismatch:.3g} nats per token, and the precision of engine and learner "
            f"explains {limit:g}, so the policy is not trained on the probabilities that it samples with; check that the "
            "engine has this model, tokenizer and temperature"
        )
