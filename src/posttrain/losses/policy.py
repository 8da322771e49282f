"""Policy losses: sums over sampled tokens. The learner divides them once per optimizer step.

In this order: the tokens of a micro-batch and their aggregation weights, importance ratios, the correction for rollout
policies that differ from the learner, the losses, and metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from posttrain.errors import RunError
from posttrain.recipe.loss import CorrectionRecipe, LossRecipe

if TYPE_CHECKING:
    import torch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before `exp`, which keeps it finite in float32. Beyond that the gradient is zero."""

Metrics = dict[str, tuple[float, float]]
"""Name -> (sum, count). Sums and counts add up exactly over micro-batches; the mean is sum / count."""


@dataclass(frozen=True)
class TokenBatch:
    """The N sampled tokens of the S streams of one micro-batch, stream after stream. A stream is never split."""

    rollout_logprobs: torch.Tensor
    """[N] float: log-probabilities, in nats, under the policy that sampled the tokens."""
    advantages: torch.Tensor
    """[N] float."""
    stream: torch.Tensor
    """[N] int64: index of each token's stream, 0..S-1."""
    lengths: torch.Tensor
    """[S] int64: sampled tokens of each stream."""
    weights: torch.Tensor
    """[N] float: aggregation weight of each token. The learner divides the weighted sum once per optimizer step."""
    ref_logprobs: torch.Tensor | None = None
    """[N] float: log-probabilities under the reference model."""
    old_logprobs: torch.Tensor | None = None
    """[N] float: the learner's own log-probabilities before the step's updates; None takes `rollout_logprobs`."""
    factors: torch.Tensor | None = None
    """[N] float: factor of each token's policy loss, from rules that need the whole update; None means 1."""

    def stream_sums(self, values: torch.Tensor) -> torch.Tensor:
        """[N], differentiable: the sum of `values` [N] over the stream of each token."""
        sums = values.new_zeros(len(self.lengths))
        return sums.index_add(0, self.stream, values)[self.stream]

    def stream_means(self, values: torch.Tensor) -> torch.Tensor:
        """[N], differentiable: the mean of `values` [N] over the stream of each token."""
        return self.stream_sums(values) / self.lengths[self.stream]


Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def token_weights(
    kind: Aggregation, lengths: Sequence[int], constant: float | None = None, episodes: Sequence[int] | None = None
) -> tuple[list[float], float]:
    """Weight of each stream's tokens, and the divisor of their weighted sum.

    `lengths`: sampled tokens of *all* streams of the optimizer step, including streams that are not computed; 0 for
    streams that are left out, such as those of a group of one with a group baseline.
    `episodes`: number of the episode of each stream; None if every stream is its own episode.

    - `token_mean`: weight 1, divisor sum of lengths (DAPO, arXiv 2503.14476). Biased: the divisor is
      random, and correlates with returns if lengths do.
    - `sequence_mean`: weight 1 / sampled tokens of the episode, in all its streams, divisor number of episodes with
      sampled tokens (GRPO, arXiv 2402.03300). Biased: a token of a short episode has more weight than one of a long episode.
    - `constant`: weight 1, divisor `constant` (Dr. GRPO, arXiv 2503.20783). Unbiased up to that constant.

    ValueError if `constant` is needed and missing. A step without sampled tokens has divisor 1.
    """
    if kind == "sequence_mean":
        owners = range(len(lengths)) if episodes is None else episodes
        totals: dict[int, int] = {}
        for owner, n in zip(owners, lengths, strict=True):
            totals[owner] = totals.get(owner, 0) + n
        weights = [1.0 / totals[owner] if totals[owner] else 0.0 for owner in owners]
        return weights, float(sum(n > 0 for n in totals.values()) or 1)
    if kind == "token_mean":
        return [1.0] * len(lengths), float(sum(lengths) or 1)
    if constant is None:
        raise ValueError("the aggregation `constant` needs its constant")
    return [1.0] * len(lengths), constant


def token_ratio(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """pi / pi_old at each token [N], differentiable; pi_old is `batch.old_logprobs`, or the rollout policy if that is
    None."""
    return bounded_exp(logprobs - old_logprobs(batch))


def sequence_ratio(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """exp(mean over the stream's sampled tokens of log pi / pi_old), at each token [N], differentiable.

    Source: Zheng et al. 2025, "Group sequence policy optimization", arXiv 2507.18071.
    """
    return bounded_exp(batch.stream_means(logprobs - old_logprobs(batch)))


def old_logprobs(batch: TokenBatch) -> torch.Tensor:
    """[N]: log pi_old, the denominator of the ratio."""
    return batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of a log-ratio clamped to +-20."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def importance_correction(recipe: CorrectionRecipe, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
    """Detached factors [N] = w x m for rollouts whose policy differs from the learner's, with r = pi_old / pi_rollout.

    - w, by `weights`: min(r, cap) for `token`; min(product of r over the stream, cap) for `sequence`; 1 for `none`.
    - m, by `reject`: 1 if low <= x <= high, else 0, with x = r for `token`, the product of r over the stream for
      `sequence`, and the geometric mean of r over the stream for `geometric`. The divisor of the loss is unchanged.

    Without cap and rejection, `sequence` weights are unbiased for advantages of whole streams; `token` weights ignore
    that the rollout policy also chose the preceding tokens. Truncation and rejection bound the variance and add bias.
    Sources: token weights: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training";
    token rejection: Ling team 2025, "Every step evolves" (IcePop), arXiv 2510.18855; sequence and geometric: Liu, Li et
    al. 2025, "When speed kills stability: demystifying RL collapse from the training-inference mismatch".
    ValueError if `batch.old_logprobs` is missing.
    """
    if batch.old_logprobs is None:
        raise ValueError("a correction needs the learner's own log-probabilities in `old_logprobs`")
    log_ratios = (batch.old_logprobs - batch.rollout_logprobs).detach()
    by_level = {"token": lambda x: x, "sequence": batch.stream_sums, "geometric": batch.stream_means}
    factors = log_ratios.new_ones(log_ratios.shape)
    metrics = {"correction/mismatch": sum_and_count(log_ratios.abs())}
    if recipe.weights != "none":
        cap = recipe.largest_weight
        assert cap is not None
        ratios = bounded_exp(by_level[recipe.weights](log_ratios))
        factors = ratios.clamp(max=cap)
        metrics["correction/truncated"] = sum_and_count(ratios > cap)
    if (bounds := recipe.kept_ratios) is not None:
        ratios = bounded_exp(by_level[recipe.reject](log_ratios))
        rejected = (ratios < bounds[0]) | (ratios > bounds[1])
        factors = factors.masked_fill(rejected, 0.0)
        metrics["correction/rejected"] = sum_and_count(rejected)
        if recipe.reject != "token":
            none = batch.lengths.new_zeros(batch.lengths.shape)
            counts = none.index_add(0, batch.stream, rejected.to(none.dtype))
            metrics["correction/rejected_streams"] = (number((counts > 0).sum()), number((batch.lengths > 0).sum()))
    return factors, metrics | {"correction/weight": sum_and_count(factors)}


def policy_loss(recipe: LossRecipe, logprobs: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
    """sum over tokens of weight x correction x mask x factor x loss of the token: a scalar to minimize, and metrics.

    `logprobs` [N] float, differentiable: log-probabilities of the sampled tokens under the current policy.
    """
    result = recipe.compute(logprobs, batch)
    losses, metrics = result if isinstance(result, tuple) else (result, {})
    if losses.shape != logprobs.shape:
        raise RunError(
            f"loss.type {recipe.type} returned losses of shape {tuple(losses.shape)}; they must be one per sampled token, "
            f"{tuple(logprobs.shape)}"
        )
    metrics, weights = dict(metrics), batch.weights
    if recipe.correction is not None:
        corrections, correction_metrics = importance_correction(recipe.correction, batch)
        weights = weights * corrections
        metrics |= correction_metrics
    if recipe.off_policy_mask is not None:
        masked = off_policy_mask(recipe.off_policy_mask, logprobs, batch)
        weights = weights * ~masked
        metrics["policy/off_policy_masked"] = sum_and_count(masked)
    if batch.factors is not None:
        weights = weights * batch.factors
    # The distance of the policy from the rollout policy: mean ratio, and KL(rollout policy, policy) by k1 and k3.
    log_ratio = (logprobs.detach() - batch.rollout_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (weights * losses).sum(), metrics | {
        "policy/ratio": sum_and_count(log_ratio.exp()),
        "policy/kl_rollout_k1": sum_and_count(-log_ratio),
        "policy/kl_rollout_k3": sum_and_count(log_ratio.expm1() - log_ratio),
    }


def gpg_factor(groups: Sequence[int], signal: Sequence[bool]) -> float:
    """B / (B - M) for the B streams of an update that have a baseline, of which M are in groups whose advantages are all
    0; 1 if B = M.

    `groups` [B]: the group of each stream. `signal` [B]: whether the stream has an advantage other than 0. GPG
    multiplies the loss of REINFORCE by it, so that groups whose episodes all have the same reward do not shrink the
    gradient.
    Source: Chu et al. 2025, "GPG: group policy gradient", arXiv 2504.02546.
    """
    alive = {group for group, has_signal in zip(groups, signal, strict=True) if has_signal}
    counted = sum(group in alive for group in groups)
    return len(groups) / counted if counted else 1.0


def off_policy_mask(delta: float, logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """[N] bool: tokens with A < 0 in streams whose mean log mu / pi over their tokens exceeds `delta`, in nats.

    mu is the sampling policy as computed by the engine, so the distance includes stale weights and the numerical
    difference between engine and learner. Source: DeepSeek-AI 2025, "DeepSeek-V3.2", arXiv 2512.02556, equation 9; the
    divisor is unchanged.
    """
    distance = batch.stream_means(batch.rollout_logprobs - logprobs.detach())
    return (distance > delta) & (batch.advantages < 0)


def nll(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """sum over tokens of weight x -log pi: negative log-likelihood in nats, a scalar to minimize; `logprobs` [N]."""
    return -(batch.weights * logprobs).sum()


def dft(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """sum over tokens of weight x -sg(pi) log pi: a scalar to minimize; `logprobs` [N].

    The gradient of -log pi is that of a policy gradient whose reward is 1 / pi, which is largest for the tokens that
    the model finds least likely. The factor pi removes it: each token has gradient -grad pi.
    Source: Wu et al. 2025, "On the generalization of SFT", arXiv 2508.05629 (dynamic fine-tuning).
    """
    return -(batch.weights * logprobs.detach().exp() * logprobs).sum()


def sum_and_count(values: torch.Tensor) -> tuple[float, float]:
    """(sum, count) of a tensor [N]."""
    return number(values.detach().double().sum()), float(values.numel())


def number(scalar: Any) -> Any:
    """`scalar` for a metric: a Python number, or a detached tensor if it is on a GPU.

    Reading a number from a GPU makes the CPU wait for it. The updater reads those of a whole update at once.
    """
    value = scalar.detach() if hasattr(scalar, "detach") else scalar
    return value if getattr(value, "is_cuda", False) else float(value)
