"""Kullback-Leibler divergence of the policy from the reference model: estimators and penalties.

Each estimator is a function of d = log pi - log pi_ref at a token that pi sampled; its mean approximates KL(pi,
pi_ref).
Source of k1, k2, k3: Schulman 2020, "Approximating KL divergence".
"""

from typing import Any, Literal, TypeVar

import numpy as np
import torch

from posttrain.episode import PerToken, RewardStreams
from posttrain.losses.policy import LOG_RATIO_LIMIT, Metrics, TokenBatch, bounded_exp, number

KL_LIMIT = 10.0
"""Largest value of k3, in nats per token, as in verl. Beyond that the gradient is zero."""
Estimator = Literal["k1", "k2", "k3"]
Values = TypeVar("Values", np.ndarray, torch.Tensor)


def estimate_kl(estimator: Estimator, difference: Values) -> Values:
    """k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, in nats per token, for d = log pi - log pi_ref of any shape.

    k1 is unbiased and may be negative; k2 is biased and never negative; k3 is unbiased and never negative. In k3, d is
    clamped to +-20 so that exp stays finite, and the value to `KL_LIMIT`; beyond that the gradient is 0. Both limits
    are those of verl's `low_var_kl`.
    """
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference * difference / 2
    if isinstance(difference, torch.Tensor):
        bounded = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return (torch.expm1(-bounded) + bounded).clamp(max=KL_LIMIT)
    bounded = np.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return np.minimum(np.expm1(-bounded) + bounded, KL_LIMIT)


def kl_loss(
    estimator: Estimator, logprobs: torch.Tensor, batch: TokenBatch, importance_weighted: bool = False
) -> torch.Tensor:
    """sum over tokens of weight x estimate: a scalar to add to the loss times its coefficient.

    On policy, the expected gradient of k2 is that of KL(pi, pi_ref), and the expected gradient of k3 is that of
    KL(pi_ref, pi). The expected gradient of k1 is zero, so recipes reject k1 in the loss.

    `importance_weighted`: the estimate times rho = pi / mu at the token, mu being the policy that sampled, with the
    gradient through rho too. The expectation over mu then equals the expectation over pi in the same contexts, so the
    expected gradient of k1 and k3 is that of KL(pi, pi_ref) for any mu. rho is clamped to exp(+-20). Source:
    DeepSeek-AI 2025, "DeepSeek-V3.2", arXiv 2512.02556, equation 7.
    ValueError if `batch.ref_logprobs` is missing.
    """
    if batch.ref_logprobs is None:
        raise ValueError("the KL loss needs the reference model's log-probabilities in `ref_logprobs`")
    estimates = estimate_kl(estimator, logprobs - batch.ref_logprobs)
    if importance_weighted:
        estimates = estimates * bounded_exp(logprobs - batch.rollout_logprobs)
    return (batch.weights * estimates).sum()


def kl_metrics(difference: Values) -> Metrics:
    """`policy/kl` by k3, whichever estimator the penalty uses, and the share of tokens whose k3 is clamped to
    `KL_LIMIT`, of tokens with d = `difference` [N]."""
    values: Any = difference.detach() if isinstance(difference, torch.Tensor) else difference
    values = values.double() if getattr(values, "is_cuda", False) else np.asarray(values, dtype=np.float64)
    estimates = estimate_kl("k3", values)
    count = float(len(estimates))
    return {
        "policy/kl": (number(estimates.sum()), count),
        "policy/kl_clamped": (number((estimates >= KL_LIMIT).sum()), count),
    }


def apply_kl_penalty(rewards: RewardStreams, kl: PerToken, coefficient: float) -> RewardStreams:
    """r_t - coefficient x KL_t, as new arrays. `kl` must be zero where nothing was sampled.

    Source: Ziegler et al. 2019, "Fine-tuning language models from human preferences", arXiv 1909.08593.
    """
    return RewardStreams(
        [
            [(reward - coefficient * penalty).astype(np.float32) for reward, penalty in zip(*streams, strict=True)]
            for streams in zip(rewards.values, kl, strict=True)
        ]
    )
