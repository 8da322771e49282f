"""Importance ratios and weights, and what to say about them."""

import torch

from posttrain.losses.batch import Metrics, TokenBatch
from posttrain.recipe.loss import CorrectionRecipe

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before `exp`, which is finite in float32; beyond it the gradient is zero."""


def ratio(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """pi / pi_old at each token [N], differentiable; pi_old is `batch.old_logprobs`, or the behaviour policy without it."""
    return bounded_exp(logprobs - before(batch))


def sequence_ratio(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """exp(mean over the stream's sampled tokens of log pi / pi_old), at each token [N], differentiable.

    Source: Zheng et al. 2025, "Group sequence policy optimization", arXiv 2507.18071.
    """
    return bounded_exp(batch.stream_means(logprobs - before(batch)))


def before(batch: TokenBatch) -> torch.Tensor:
    """[N]: log-probabilities that the ratio is taken to."""
    return batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of a log-ratio clamped to +-20."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def correction(recipe: CorrectionRecipe, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
    """Detached weights [N] for an engine that is not the learner: w = pi_old / behaviour, per token or stream.

    - `tis`: min(w, cap). Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
      training".
    - `mis`: w where 1 / cap <= w <= cap, else 0: the token, or the whole stream, is dropped; its place in the divisor
      stays. Source: Ling team 2025, "Every step evolves" (IcePop), arXiv 2510.18855.
    - level `sequence`: w = exp(mean of the stream's log w), the geometric mean.

    Biased by the truncation, with bounded variance. ValueError when `batch.old_logprobs` is missing.
    """
    if batch.old_logprobs is None:
        raise ValueError("a correction needs the learner's own log-probabilities in `old`")
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
        "correction/weight": total(applied),
        "correction/truncated": total(outside & ~dropped),
        "correction/dropped": total(dropped),
        "correction/mismatch": total((batch.old_logprobs - batch.rollout_logprobs).abs()),
    }


def distance(logprobs: torch.Tensor, batch: TokenBatch) -> Metrics:
    """How far the policy is from the one that sampled: mean ratio, and KL(behaviour, policy) by k1 and k3."""
    log_ratio = (logprobs.detach() - batch.rollout_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {
        "policy/ratio": total(log_ratio.exp()),
        "policy/kl_rollout_k1": total(-log_ratio),
        "policy/kl_rollout_k3": total(log_ratio.expm1() - log_ratio),
    }


def total(values: torch.Tensor) -> tuple[float, float]:
    """(sum, count) of a tensor [N]."""
    return float(values.detach().double().sum()), float(values.numel())
