"""Importance ratios, importance weights, and metrics of both."""

import torch

from posttrain.losses.batch import Metrics, TokenBatch
from posttrain.recipe.loss import CorrectionRecipe

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before `exp`, which keeps it finite in float32. Beyond that the gradient is zero."""


def token_ratio(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """pi / pi_old at each token [N], differentiable; pi_old is `batch.old_logprobs`, or the rollout policy if that is None."""
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
    """Detached importance weights [N] for the mismatch of engine and learner: w = pi_old / pi_rollout, per token or stream.

    - `tis`: min(w, cap). Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
      training".
    - `mis`: w where 1 / cap <= w <= cap, else 0, which drops the token or the whole stream. The divisor is
      unchanged. Source: Ling team 2025, "Every step evolves" (IcePop), arXiv 2510.18855.
    - level `sequence`: w = exp(mean of the stream's log w), the geometric mean.

    Truncation bounds the variance and adds bias. ValueError if `batch.old_logprobs` is missing.
    """
    if batch.old_logprobs is None:
        raise ValueError("a correction needs the learner's own log-probabilities in `old_logprobs`")
    log_weights = (batch.old_logprobs - batch.rollout_logprobs).detach()
    if recipe.level == "sequence":
        log_weights = batch.stream_means(log_weights)
    weights = bounded_exp(log_weights)
    outside = weights > recipe.cap
    if recipe.type == "tis":
        applied, dropped = weights.clamp(max=recipe.cap), torch.zeros_like(outside)
    else:
        dropped = outside | (weights < 1 / recipe.cap)
        applied = weights.masked_fill(dropped, 0.0)
    return applied, {
        "correction/weight": sum_and_count(applied),
        "correction/truncated": sum_and_count(outside & ~dropped),
        "correction/dropped": sum_and_count(dropped),
        "correction/mismatch": sum_and_count((batch.old_logprobs - batch.rollout_logprobs).abs()),
    }


def divergence_metrics(logprobs: torch.Tensor, batch: TokenBatch) -> Metrics:
    """Distance of the policy from the rollout policy: mean ratio, and KL(rollout policy, policy) by k1 and k3."""
    log_ratio = (logprobs.detach() - batch.rollout_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {
        "policy/ratio": sum_and_count(log_ratio.exp()),
        "policy/kl_rollout_k1": sum_and_count(-log_ratio),
        "policy/kl_rollout_k3": sum_and_count(log_ratio.expm1() - log_ratio),
    }


def sum_and_count(values: torch.Tensor) -> tuple[float, float]:
    """(sum, count) of a tensor [N]."""
    return float(values.detach().double().sum()), float(values.numel())
