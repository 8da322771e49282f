"""Losses of the policy and the terms added to them."""

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from posttrain.recipe.base import BaseConfig
from posttrain.recipe.metrics import GREEN, ORANGE, Metric, Panel
from posttrain.recipe.model import LOSS_TERMS, MISMATCH
from posttrain.recipe.needs import Around, Needs, needs, unless
from posttrain.recipe.registry import F, Registry, Section

CORRECTION_CAPS = {"token": 2.0, "sequence": 3.0}
"""Default `cap` by `weights`: that of verl's and of TRL's recipes."""
CORRECTION_BOUNDS = {"token": (0.5, 2.0), "sequence": (1 / 3, 3.0), "geometric": (0.999, 1.001)}
"""Default `bounds` by `reject`."""


class CorrectionRecipe(BaseConfig):
    """Importance-sampling correction for the difference between the rollout's and the learner's log-probabilities, with r = p_old / p_rollout at a token. `weights` and `reject` combine, for example token weights with geometric rejection."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("correction/mismatch", "mean |log ratio| of learner and engine, before weights and rejection"),
        Metric("correction/weight", "mean importance weight"),
        Metric("correction/truncated", "share of tokens whose importance weight was capped"),
        Metric("correction/rejected", "share of tokens rejected by `loss.correction`"),
        Metric("correction/rejected_streams", "share of streams rejected by `loss.correction`"),
    )

    weights: Literal["token", "sequence", "none"] = "token"
    """Factor of a token's loss, truncated at `cap`. `token`: r of the token. `sequence`: the product of r over the stream. `none`: 1."""
    cap: Annotated[float | None, unless("weights", "none", refused=True)] = Field(None, gt=1)
    """Largest factor. Null: 2 for `token`, 3 for `sequence`."""
    reject: Literal["none", "token", "sequence", "geometric"] = "none"
    """What is masked where a ratio is outside `bounds`. `token`: single tokens, by r. `sequence`: whole streams, by the product of r. `geometric`: whole streams, by the geometric mean of r."""
    bounds: Annotated[tuple[float, float] | None, unless("reject", "none", refused=True)] = None
    """Smallest and largest ratio that is kept. Null: 0.5 to 2 for `token`, 1/3 to 3 for `sequence`, 0.999 to 1.001 for `geometric`."""

    def _check(self) -> None:
        if self.weights == "none" and self.reject == "none":
            raise ValueError("a correction needs `weights` or `reject`; set one of them, or remove `correction`")
        if self.bounds is not None and not 0 <= self.bounds[0] < 1 < self.bounds[1]:
            raise ValueError("`bounds` must be a number below 1, at least 0, and one above 1")

    @property
    def largest_weight(self) -> float | None:
        """`cap`, or its default. None with `weights: none`."""
        return CORRECTION_CAPS.get(self.weights) if self.cap is None else self.cap

    @property
    def kept_ratios(self) -> tuple[float, float] | None:
        """`bounds`, or their default. None with `reject: none`."""
        return CORRECTION_BOUNDS.get(self.reject) if self.bounds is None else self.bounds


class Aggregation(BaseConfig):
    """How the losses of tokens become the loss of an update."""

    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """How token losses are averaged over the optimizer update. `token_mean`: over all sampled tokens. `sequence_mean`: mean per episode, over the tokens of all its streams, then over episodes. `constant`: sum divided by `constant`."""
    constant: float | None = Field(None, gt=0)
    """Divisor for `aggregation: constant`. Dr. GRPO uses episodes x longest answer."""

    def _check(self) -> None:
        if (self.aggregation == "constant") != (self.constant is not None):
            raise ValueError("set `constant` if and only if `aggregation: constant`")


class PolicyLoss(Aggregation, Section):
    """Keys that every policy loss has."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("loss/policy", "policy", LOSS_TERMS, ORANGE),
        Metric("policy/ratio", "mean probability ratio"),
        Metric("policy/kl_rollout_k1", "KL divergence of learner and engine, estimator k1, nats per token"),
        Metric("policy/kl_rollout_k3", "the same with estimator k3"),
        Metric("policy/off_policy_masked", "share of tokens masked by `loss.off_policy_mask`"),
        Metric("policy/truncated_masked", "share of episodes masked by `loss.mask_truncated`"),
        Metric("policy/clipped_before_update", "share of tokens without a gradient by the clip before any update"),
        MISMATCH,
    )

    ratio_to: ClassVar[Literal["old", "rollout"] | None] = "old"
    """What the loss compares the policy with: old log-probabilities, always those of the rollout, or nothing."""

    old: Annotated[
        Literal["auto", "learner", "rollout"],
        Needs(
            lambda find: find("ratio_to") == "old" or find("correction") is not None,
            lambda find: f"loss.type {find('type')} does not use old log-probabilities",
        ),
    ] = "auto"
    """Old log-probabilities of the ratio. `learner`: those of the learner before the step's first update; one more forward pass where a step makes several updates. `rollout`: those of the engine. `auto`: `learner` where the two can differ (weights that are not float32, engines other than `local`, `rollout.async_rollouts` above 0, adapters with dropout) or with `correction`, else `rollout`."""
    correction: CorrectionRecipe | None = None
    """Correction for rollouts whose log-probabilities differ from the learner's (vLLM, bfloat16, stale weights). Null: none."""

    off_policy_mask: float | None = Field(None, gt=0)
    """Mask tokens with a negative advantage in streams whose mean log-ratio of the sampling to the current policy exceeds this, in nats per token (DeepSeek-V3.2). Null: off."""
    mask_truncated: bool = False
    """Leave episodes whose last answer a token limit cut out of the loss and of its divisor (DAPO's overlong filtering). They still count in group statistics."""

    def _check(self) -> None:
        if self.correction is not None and self.old == "rollout":
            raise ValueError("`correction` compares the learner with the rollout, so it needs `old: learner` or `auto`")

    @property
    def compares_with_rollout(self) -> bool:
        """Whether the ratio is to the sampling policy, which accounts for stale tokens."""
        return self.ratio_to == "rollout" or (self.ratio_to == "old" and self.old == "rollout")

    @property
    def averages_advantages(self) -> bool:
        """Whether every token is weighted by the mean advantage of its stream, so the position of credit has no effect."""
        return False

    @property
    def compares_streams(self) -> str | None:
        """The key that sums log-ratios to the rollout over whole streams, or uses the rollout's log-probabilities
        instead of the learner's; None if there is none."""
        for name, values in (("weights", ("sequence",)), ("reject", ("sequence", "geometric"))):
            if self.correction is not None and (value := getattr(self.correction, name)) in values:
                return f"loss.correction.{name}: {value}"
        return "loss.old: rollout" if self.old == "rollout" else None

    def old_source(self, may_differ: bool) -> Literal["learner", "rollout"]:
        """Where old log-probabilities come from. `may_differ`: whether those of rollout and learner can differ."""
        if self.correction is not None:
            return "learner"
        if self.ratio_to != "old":
            return "rollout"
        if self.old != "auto":
            return self.old
        return "learner" if may_differ else "rollout"


LOSSES = Registry("loss", "posttrain.losses", PolicyLoss, ("posttrain.losses.surrogates",))
"""Policy losses by `type`."""
LossRecipe = Annotated[SerializeAsAny[PolicyLoss], BeforeValidator(LOSSES.validate)]


def register_loss(*names: str, metrics: tuple[Metric, ...] = ()) -> Callable[[F], F]:
    """Decorator that adds a policy loss, which recipes choose with `loss.type: name`.

        @posttrain.register_loss("soft_ppo")
        def soft_ppo(logprobs, batch, *, sharpness: float = 5.0):
            ratio = (logprobs - batch.rollout_logprobs).exp()
            return -batch.advantages * torch.tanh(sharpness * (ratio - 1))

    The function receives the log-probabilities of the sampled tokens under the current policy, [N] float,
    differentiable, and a `posttrain.losses.policy.TokenBatch`. It returns one loss per token, [N], to be minimized,
    optionally together with a dict of metrics as (sum, count). `aggregation` and `correction` apply to it as to the
    built-in losses. Its keyword-only parameters, which need type annotations, become keys of the `loss` section.
    The built-in losses are classes of that section, with the function as their method `compute`, see
    `posttrain.losses.surrogates`.

    `metrics`: the meaning of each metric, for the documentation, studies and figures.

    Raises:
        ValueError: `names` has the name of a built-in loss, or a parameter cannot be a key.
    """
    return LOSSES.register(*names, metrics=metrics)


class SftLossRecipe(BaseConfig):
    """Loss of supervised fine-tuning, a mean over the trained tokens of the update."""

    type: Literal["nll", "dft"] = "nll"
    """`nll`: negative log-likelihood. `dft`: dynamic fine-tuning, the same times the token's probability without gradient, so that tokens the model finds unlikely do not dominate."""


KL_STEP = 0.2
"""The adaptive KL coefficient changes by at most this share per horizon (Ziegler et al. 2019)."""


class ReferenceRecipe(BaseConfig):
    """Updates of the reference model towards the policy (TR-DPO; Gorbatovski et al. 2024, arXiv 2404.09656)."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("reference/updates", "updates of a reference model that follows the policy"),
    )

    update_every: int | None = Field(None, ge=1)
    """Optimizer steps of the policy between updates of the reference model; skipped steps do not count. Null: the reference model stays the initial model."""
    mix: Annotated[float, needs("update_every", refused=True)] = Field(1.0, gt=0, le=1)
    """Share of the policy's weights in the updated reference model: reference = mix x policy + (1 - mix) x reference. 1: a copy of the policy (hard update); below 1: a moving average (soft update)."""


ADAPTERS_OFF = "cannot be set with `model.lora`, where the reference model is the policy with its adapters off; remove one of the two"
"""Why the reference model has no separate weights that could be updated."""


PENALIZED = needs("coefficient")
DISTANCE = Panel("Distance from the reference model", "nats per token", figure="kl")


class KlRecipe(BaseConfig):
    """KL penalty towards the reference model."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("policy/kl", "Kullback-Leibler divergence", DISTANCE),
        Metric("kl/coefficient", "KL coefficient", Panel("Penalty", "coefficient", figure="kl")),
        Metric("loss/kl", "KL", LOSS_TERMS, GREEN),
        Metric("policy/kl_clamped", "share of tokens whose k3 estimate reached its limit of 10"),
    )

    coefficient: float = Field(0.0, ge=0)
    """Weight of the penalty (beta). 0: off, and no reference model is loaded."""
    estimator: Annotated[Literal["k1", "k2", "k3"] | None, PENALIZED] = None
    """k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, with d = log p - log p_ref. Null: k3 in the loss, and in the reward k1, the only one that is a KL penalty there."""
    apply_to: Annotated[Literal["loss", "reward"], PENALIZED] = "loss"
    """`loss`: add the penalty to the loss. `reward`: subtract it from the reward of each sampled token."""
    importance_weighted: Annotated[bool, PENALIZED, needs("apply_to", "loss", refused=True)] = False
    """In the loss, multiply the estimate by p / p_rollout, with the gradient through both (DeepSeek-V3.2, equation 7). With k1 or k3, the expected gradient is then that of KL(p, p_ref) also for stale or repeated samples."""
    target: Annotated[float | None, needs("coefficient", refused=True)] = Field(None, gt=0)
    """Target KL per token of the adaptive coefficient. Null: fixed coefficient."""
    horizon: Annotated[float, PENALIZED, needs("target")] = Field(10_000.0, gt=0)
    """Adaptive coefficient: a step changes it by at most 20% x episodes / horizon. A short horizon can undo what was learned."""
    reference: Annotated[ReferenceRecipe, PENALIZED] = ReferenceRecipe()

    def _check(self) -> None:
        unweighted = self.apply_to == "loss" and not self.importance_weighted
        if unweighted and self.estimator == "k1" and self.coefficient > 0:
            remedy = "use `estimator: k2` or `k3`, `importance_weighted: true` or `apply_to: reward`"
            raise ValueError(f"the gradient of k1 in the loss is zero on average; {remedy}")
        if self.importance_weighted and self.estimator == "k2":
            remedy = "use `estimator: k1` or `k3`, or `importance_weighted: false`"
            raise ValueError(f"the importance-weighted k2 does not have the gradient of the KL divergence; {remedy}")
        if self.apply_to == "reward" and self.estimator not in (None, "k1"):
            raise ValueError(
                f"`estimator: {self.estimator}` in the reward is not a KL penalty: the cosine of its expected gradient with that of "
                "the KL is +0.05 near KL 0 and -0.99 at KL 0.16 for k3, and +1.00 for k1; use k1, or `apply_to: loss`"
            )

    @property
    def estimator_in_use(self) -> Literal["k1", "k2", "k3"]:
        """`estimator`, or its default."""
        return self.estimator or ("k1" if self.apply_to == "reward" else "k3")


COVARIANCE = Metric("policy/covariance", "mean product of centered log-probability and centered advantage")


class ClipCovRecipe(BaseConfig):
    """Clip-Cov: a few tokens whose log-probability and advantage vary together lose their gradient."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        COVARIANCE,
        Metric("policy/clip_cov_masked", "share of tokens without a gradient because of `clip_cov`"),
    )

    type: Literal["clip_cov"] = "clip_cov"
    """`clip_cov`: random tokens among those with a covariance between `low` and `high`."""
    share: float = Field(2e-4, gt=0, lt=1)
    """Share of the update's tokens that lose their gradient, at least one token."""
    low: float = 1.0
    """Smallest covariance of such a token, in nats times advantage. The mean over tokens is far below 1."""
    high: float = 5.0
    """Largest covariance of such a token."""

    def _check(self) -> None:
        if self.low >= self.high:
            raise ValueError("`low` must be below `high`")


class KlCovRecipe(BaseConfig):
    """KL-Cov: the tokens whose log-probability and advantage vary together the most are held near the old policy."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        COVARIANCE,
        Metric("policy/kl_cov_held", "share of tokens with the penalty of `kl_cov`"),
        Metric("loss/kl_cov", "covariance penalty"),
    )

    type: Literal["kl_cov"] = "kl_cov"
    """`kl_cov`: the tokens with the largest covariance. It has an effect from the second update of a step on."""
    share: float = Field(2e-3, gt=0, lt=1)
    """Share of the update's tokens that get the penalty, at least one token."""
    coefficient: float = Field(1.0, gt=0)
    """Weight of the penalty, the absolute log-ratio to the old policy."""


def _held(find: Around) -> bool:
    learner, loss = find("learner"), find("loss")
    return learner is None or loss is None or learner.several_updates or loss.compares_with_rollout


_BEFORE_AN_UPDATE = "the gradient of the penalty of kl_cov is 0 before the first update of a step, and a step makes one"


class EntropyRecipe(BaseConfig):
    """Entropy bonus, and rules that keep the entropy of the policy from collapsing."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("entropy/coefficient", "coefficient of the entropy bonus"),
        Metric("policy/bonus_entropy", "entropy at the tokens of the entropy bonus, nats"),
        Metric("policy/low_entropy_masked", "share of tokens without a gradient because of `entropy.top_share`"),
    )

    coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus in the loss; with `target`, its start. 0: off."""
    tokens: Annotated[
        Literal["all", "after_thinking", "answer"],
        needs("has_bonus", reason="there is no bonus", remedy="set entropy.coefficient or entropy.target"),
    ] = "all"
    """Sampled tokens that get the bonus, and whose entropy `target` is about. `after_thinking`: those after `</think>`, without the end token. `answer`: those between `<answer>` and `</answer>`. A bonus on all tokens makes answers in the wrong form more likely."""
    target: float | None = Field(None, gt=0)
    """Target entropy of these tokens in nats: the coefficient rises by `step` after a step below it and falls above, where the bonus is off. Null: fixed coefficient."""
    step: Annotated[float, needs("target")] = Field(0.005, gt=0)
    """With `target`: change of the coefficient per step."""
    max_coefficient: Annotated[float, needs("target")] = Field(1.0, gt=0)
    """With `target`: largest coefficient."""
    top_share: float = Field(1.0, gt=0, le=1)
    """Policy gradient only of this share of an update's tokens, those with the highest entropy before the step's updates. Below 1 it costs a forward pass. 1: all tokens."""
    covariance: Annotated[
        Annotated[ClipCovRecipe | KlCovRecipe, Field(discriminator="type")] | None,
        Needs(_held, _BEFORE_AN_UPDATE, only=lambda rule: isinstance(rule, KlCovRecipe)),
    ] = None
    """Rule for tokens with a large covariance of log-probability and advantage, which lower the entropy most. Null: none."""

    @property
    def has_bonus(self) -> bool:
        """Whether the loss ever has a bonus."""
        return self.coefficient > 0 or self.target is not None

    def _check(self) -> None:
        if self.target is not None and self.coefficient > self.max_coefficient:
            raise ValueError("`coefficient` is above `max_coefficient`; lower it, or raise the latter")


class _Preference(BaseConfig):
    """Keys of losses on answers that are preferred or not."""

    needs_reference: ClassVar[bool] = True

    beta: float = Field(0.1, gt=0)
    """Implicit reward per nat of the log-ratio to the reference: larger stays closer to the reference."""


class DpoLoss(_Preference):
    """Direct preference optimization: logistic loss of the difference of the log-ratios to the reference model."""

    type: Literal["dpo"] = "dpo"
    """`dpo`: direct preference optimization."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed share of flipped preference labels."""


class CdpoLoss(_Preference):
    """Conservative DPO: `dpo` with label smoothing, for noisy labels."""

    type: Literal["cdpo"] = "cdpo"
    """`cdpo`: the loss of `dpo`, always with label smoothing."""
    label_smoothing: float = Field(0.1, gt=0, lt=0.5)
    """Assumed share of flipped preference labels."""


class IpoLoss(_Preference):
    """Identity preference optimization: squared loss with a finite target for the log-ratios."""

    type: Literal["ipo"] = "ipo"
    """`ipo`: identity preference optimization, on log-ratios averaged over the tokens of the answer."""
    beta: float = Field(0.1, gt=0)
    """Regularization (tau in the paper): the target of the difference of averaged log-ratios is 1 / (2 beta)."""


class SimpoLoss(_Preference):
    """Simple preference optimization: logistic loss of length-averaged log-probabilities, without a reference model."""

    needs_reference: ClassVar[bool] = False

    type: Literal["simpo"] = "simpo"
    """`simpo`: simple preference optimization."""
    beta: float = Field(2.0, gt=0)
    """Implicit reward per nat of the answer's mean log-probability."""
    gamma: float = Field(1.0, ge=0)
    """Target margin between the implicit rewards, in their unit (after beta)."""


class KtoLoss(_Preference):
    """Kahneman-Tversky optimization: single answers labeled good or bad, relative to a common reference point."""

    type: Literal["kto"] = "kto"
    """`kto`: Kahneman-Tversky optimization; a pair counts as two rows, one good and one bad answer."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of good answers."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of bad answers."""


class OrpoLoss(_Preference):
    """Odds ratio preference optimization: supervised loss on the chosen answer plus an odds-ratio term, without a reference model."""

    needs_reference: ClassVar[bool] = False

    type: Literal["orpo"] = "orpo"
    """`orpo`: odds ratio preference optimization."""
    beta: float = Field(0.1, gt=0)
    """Weight of the odds-ratio term (lambda in the paper)."""


class ApoZeroLoss(_Preference):
    """Anchored preference optimization, zero: raises the chosen answer and lowers the rejected one, each relative to the reference model."""

    type: Literal["apo_zero"] = "apo_zero"
    """`apo_zero`: for chosen answers that are better than the model's own."""


class ApoDownLoss(_Preference):
    """Anchored preference optimization, down: lowers both answers, and the rejected one more."""

    type: Literal["apo_down"] = "apo_down"
    """`apo_down`: for chosen answers that are worse than the model's own."""


class BcoLoss(_Preference):
    """Binary classifier optimization: logistic loss of each answer's implicit reward, relative to a running mean of them."""

    type: Literal["bco"] = "bco"
    """`bco`: binary classifier optimization."""
    shift: bool = True
    """Subtract the mean implicit reward of all answers of earlier updates (the reward shift of the paper). False: subtract nothing."""


PairLossRecipe = DpoLoss | CdpoLoss | IpoLoss | SimpoLoss | OrpoLoss | ApoZeroLoss | ApoDownLoss | BcoLoss
"""Losses that compare the two answers of a pair."""

PreferenceLossRecipe = Annotated[PairLossRecipe | KtoLoss, Field(discriminator="type")]


class RewardLossRecipe(BaseConfig):
    """Loss of a reward model."""

    type: Literal["bradley_terry"] = "bradley_terry"
    """`bradley_terry`: the logistic loss of the difference of the two scores."""
    margin: bool = True
    """Subtract the row's margin column from the score difference; rows without one have margin 0."""
    center_rewards_coefficient: float = Field(0.0, ge=0)
    """Weight of the squared sum of the two scores, which centers scores at 0 (Eisenstein et al. 2023, arXiv 2312.09244)."""
