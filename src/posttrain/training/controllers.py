"""What an optimizer step of the policy depends on besides its loss: the shaping of rewards, the coefficients of KL penalty
and entropy bonus, the old log-probabilities, and a reference model that follows. Guards notice when training collapses.

`PolicyLearner` makes the optimizer steps of `rl` and of the public `Learner`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from posttrain.credit.assign import reward_streams
from posttrain.episode import CUT_OFF, Advantages, Episode, RewardStreams
from posttrain.errors import RunError
from posttrain.losses.kl import apply_kl_penalty, estimate_kl
from posttrain.models.forward import TokenScores
from posttrain.models.gate import tolerance
from posttrain.models.load import resolve_dtype
from posttrain.models.policy import Policy
from posttrain.recipe.guards import GUARDS
from posttrain.recipe.loss import KL_STEP, EntropyRecipe, KlRecipe, PolicyLoss
from posttrain.recipe.model import ModelRecipe, RewardSource
from posttrain.recipe.rollout import RolloutRecipe
from posttrain.recipe.run import SampledRecipe
from posttrain.rollout.filters import overlong_penalty
from posttrain.seeds import random_stream
from posttrain.training.objectives import PolicyObjective, metrics_without_pass
from posttrain.training.reference import MovingReference
from posttrain.training.updater import Objective, Samples, Totals, Updater, add_totals, computed, per_token

RAW = "reward_model"
"""Key of the reward model's unscaled reward in a turn's info."""


def set_advantages(samples: Samples, credit: Advantages) -> None:
    """Set `advantages` and `has_baseline` of each sample."""
    streams = [
        (stream, position not in credit.without_baseline)
        for position, episode in enumerate(credit.values)
        for stream in episode
    ]
    for sample, (advantages, has_baseline) in zip(samples, streams, strict=True):
        sample.advantages, sample.has_baseline = advantages[sample.stream.sampled], has_baseline


def rounds_or_drops(model: ModelRecipe, device: torch.device) -> bool:
    """Whether the learner's log-probabilities have a precision below float32, or are affected by adapter dropout."""
    rounded = resolve_dtype(model.dtype, device) != torch.float32
    return rounded or (model.lora is not None and model.lora.dropout > 0)


class PolicyLearner:
    """Makes the optimizer steps of a policy: its loss with the KL penalty and the entropy bonus.

    Attributes:
        updater: makes the optimizer steps.
        kl, entropy: the coefficients, which belong in a checkpoint.
        moving: moves the reference model of the KL penalty; None if it stays the initial model.
    """

    def __init__(
        self,
        policy: Policy,
        updater: Updater[TokenScores],
        loss: PolicyLoss,
        kl: KlRecipe,
        entropy: EntropyRecipe,
        old: Literal["learner", "rollout"],
        extend: Callable[[PolicyObjective], Objective[TokenScores]] = lambda objective: objective,
    ) -> None:
        """`old`: whose log-probabilities are the old ones. `extend`: adds further terms to the objective of an update."""
        self.policy, self.updater, self.loss, self.old, self.extend = policy, updater, loss, old, extend
        self.kl, self.entropy = KlController(kl), EntropyController(entropy)
        moves = kl.coefficient > 0 and kl.reference.update_every is not None
        self.moving = MovingReference(kl.reference, policy, updater.optimizer) if moves else None

    def objective(self, first: bool) -> Objective[TokenScores]:
        """The objective of an update. `first`: whether no update on these samples came before."""
        kl, entropy = self.kl, self.entropy
        random = random_stream(self.policy.seed, "clip_cov", self.policy.version)
        objective = PolicyObjective(
            self.loss, kl.recipe, kl.coefficient, entropy.recipe, entropy.coefficient, self.old, first, random
        )
        return self.extend(objective)

    def step(self, samples: Samples, first: bool, rows: Samples = ()) -> Totals:
        """Make one optimizer step on the samples of episodes, and on supervised `rows`. `first` as for `objective`."""
        objective = self.objective(first)
        totals = self.updater.update([*samples, *rows], objective)
        if self.moving is not None:
            self.moving.follow()
        if not totals["optimizer/skipped"][0]:
            add_totals(totals, metrics_without_pass(objective, samples))
        return totals

    def observe(self, metrics: dict[str, float], episodes: int) -> None:
        """Add the coefficients of a step to its metrics, and adapt them to what it measured on so many `episodes`."""
        if self.kl.recipe.coefficient > 0:
            metrics["kl/coefficient"] = self.kl.coefficient
        if self.moving is not None:
            metrics["reference/updates"] = float(self.moving.updates)
        self.kl.update(metrics.get("policy/kl"), episodes)
        if self.entropy.used:
            metrics["entropy/coefficient"] = self.entropy.coefficient
        self.entropy.update(metrics)


class Saved:
    """An object whose attributes `saved` belong in a checkpoint, as plain JSON."""

    saved: ClassVar[tuple[str, ...]]

    def state_dict(self) -> dict[str, Any]:
        return {name: copy(getattr(self, name)) for name in self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.saved:
            setattr(self, name, state[name])


class KlController(Saved):
    """The KL coefficient: fixed, or adapted to a target.

    Adaptive: e = clip(KL / target - 1, -s, s) with s = `KL_STEP`, coefficient x (1 + e n / horizon) after n episodes; n
    is capped at one horizon, so one update changes the coefficient by at most a share s. Source: Ziegler et al. 2019.
    """

    saved = ("coefficient",)

    def __init__(self, recipe: KlRecipe) -> None:
        self.recipe = recipe
        self.coefficient = recipe.coefficient

    def update(self, kl: float | None, episodes: int) -> None:
        """Adapt to `kl`, the measured KL per token in nats. None or a value that is not finite changes nothing."""
        if self.recipe.target is None or kl is None or not math.isfinite(kl):
            return
        error = min(max(kl / self.recipe.target - 1, -KL_STEP), KL_STEP)
        self.coefficient *= 1 + error * min(episodes / self.recipe.horizon, 1.0)


class EntropyController(Saved):
    """The coefficient of the entropy bonus: fixed, or adapted to a target.

    Adaptive: after each step with entropy H, c becomes c + `step` if H < target, else c - `step`, within 0 and
    `max_coefficient`. The bonus of the next step has the coefficient c if H <= target, else 0. Source: He et al. 2025,
    "Skywork open reasoner 1", arXiv 2505.22312, section 4 (adaptive entropy control), where H is measured before the
    update.
    """

    saved = ("adapted", "below")

    def __init__(self, recipe: EntropyRecipe) -> None:
        self.recipe = recipe
        self.used = recipe.has_bonus
        """Whether the bonus ever has a coefficient above 0."""
        self.adapted = recipe.coefficient
        self.below = True

    @property
    def coefficient(self) -> float:
        """The coefficient of the next step's bonus."""
        return self.adapted if self.below else 0.0

    def update(self, metrics: Mapping[str, float]) -> None:
        """Adapt to the entropy, in nats per token, of the tokens that get the bonus, in the `metrics` of a step. An entropy
        that is missing or not finite changes nothing."""
        target = self.recipe.target
        entropy = metrics.get("policy/entropy" if self.recipe.tokens == "all" else "policy/bonus_entropy")
        if target is None or entropy is None or not math.isfinite(entropy):
            return
        change = self.recipe.step if entropy < target else -self.recipe.step
        self.adapted = min(max(self.adapted + change, 0.0), self.recipe.max_coefficient)
        self.below = entropy <= target


def scaled(raw: float, mean: float, std: float, clip: float | None) -> float:
    """(raw - mean) / std, clipped to [-clip, clip]."""
    value = (raw - mean) / std
    return value if clip is None else min(max(value, -clip), clip)


class RunningStatistics(Saved):
    """Mean and standard deviation of the reward model's rewards in training so far (Welford 1962)."""

    saved = ("count", "mean", "squares")

    def __init__(self, source: RewardSource | None) -> None:
        self.source = source
        self.active = source is not None and source.normalize == "running"
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def include(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes if self.active else []:
            raw = episode.turns[-1].info.get(RAW)
            if raw is not None:
                self.count += 1
                shift = raw - self.mean
                self.mean += shift / self.count
                self.squares += shift * (raw - self.mean)

    def correction(self, info: dict[str, Any]) -> float:
        """The value to add to the raw reward of a turn with `info` to get the scaled reward."""
        return self.scaled(info[RAW]) - info[RAW] if self.active and RAW in info else 0.0

    def scaled(self, raw: float) -> float:
        """`raw` normalized by the mean and standard deviation so far."""
        assert self.source is not None
        if self.count < 2 or self.squares <= 0:
            return 0.0  # all rewards so far are equal
        return scaled(raw, self.mean, math.sqrt(self.squares / (self.count - 1)), self.source.clip)


@dataclass(frozen=True)
class RewardShaping:
    """Turns the rewards of episodes into reward streams: normalization, penalties for length, KL."""

    rollout: RolloutRecipe
    kl: KlRecipe
    running: RunningStatistics
    """Statistics of the reward model's rewards, for `reward.normalize: running`."""
    teacher_coefficient: float = 0.0
    """Reward per nat of log teacher - log policy at each sampled token; 0 without a teacher."""

    def shape(self, episodes: Sequence[Episode], samples: Samples, kl_coefficient: float) -> RewardStreams:
        """Reward streams of `episodes`. The `samples` need `ref_logprobs` if the KL penalty is in the reward, and the
        teacher's scores if a teacher is."""
        rewards = reward_streams(episodes)
        for episode, streams in zip(episodes, rewards.values, strict=True):
            last = episode.turns[-1]
            end = streams[last.stream][last.stop - 1 : last.stop]
            end += self.running.correction(last.info)
            if last.stop_reason in CUT_OFF:
                end -= self.rollout.missing_eos_penalty
            if self.rollout.overlong_penalty is not None:
                end += overlong_penalty(episode.sampled_tokens, self.rollout.overlong_penalty)
        if kl_coefficient > 0 and self.kl.apply_to == "reward":
            estimator = self.kl.estimator_in_use
            gaps = (s.rollout_logprobs - computed(s.ref_logprobs) for s in samples)
            kl = per_token(episodes, (estimate_kl(estimator, gap) for gap in gaps))
            rewards = apply_kl_penalty(rewards, kl, kl_coefficient)
        if self.teacher_coefficient > 0:
            # In the reward, only k1 has the gradient of the divergence as its expected gradient.
            gaps = (s.rollout_logprobs - computed(s.teacher).logprobs for s in samples)
            rewards = apply_kl_penalty(rewards, per_token(episodes, gaps), self.teacher_coefficient)
        return rewards


class Guards(Saved):
    """Counts, per guard, the consecutive steps beyond its threshold.

    The metrics are those of Wang et al. 2025, "RAGEN", arXiv 2504.20073: the spread of returns collapses first, then
    entropy, and gradient spikes mark the steps after which a run does not recover.
    """

    saved = ("in_a_row", "since", "first", "stopped")

    def __init__(self, recipe: Any) -> None:
        """`recipe`: that of the run."""
        self.run, self.recipe = recipe, recipe.guards
        self.stopped = False
        """Whether a guard has ended the run."""
        self.in_a_row = {guard.key: 0 for guard in GUARDS}
        self.since = {guard.key: 0 for guard in GUARDS}
        """The step at which the count of a guard began."""
        self.first: dict[str, float] = {}
        """The first value of each guard, and of the return, in the run."""

    def check(self, metrics: dict[str, float], step: int) -> list[str]:
        """One sentence for each guard that fires at this step, usually none.

        A metric that is missing or NaN leaves the count unchanged. A guard fires at most once in `patience` steps.
        """
        fired, gained = [], metrics.get("rollout/return", math.nan)
        fell = gained < self._first("rollout/return", gained)
        for guard in GUARDS:
            threshold, value = self.recipe.thresholds.get(guard.key), guard.value(metrics)
            if threshold is None or math.isnan(value):
                continue
            first = self._first(guard.key, value)
            beyond = guard.beyond(metrics, threshold, first)
            if beyond and not self.in_a_row[guard.key]:
                self.since[guard.key] = step
            self.in_a_row[guard.key] = self.in_a_row[guard.key] + 1 if beyond else 0
            if beyond and self.in_a_row[guard.key] % self.recipe.patience == 0:
                since = f"since step {self.since[guard.key]}"
                fired.append(guard.sentence(self.run, value, threshold, since, first, fell))
        self.stopped = bool(fired) and self.recipe.action == "stop"
        return fired

    def _first(self, name: str, value: float) -> float:
        """The first finite value of `name`, which is `value` if there was none; NaN without one."""
        return self.first.setdefault(name, value) if math.isfinite(value) else self.first.get(name, math.nan)


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
