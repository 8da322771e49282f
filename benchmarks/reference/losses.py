"""Policy losses, corrections, KL penalties and their mean, from the papers. All tensors are [B, T] float64.

Each loss gives one number per token, to be minimized. Notation: `logp` is log pi of the policy in training, with gradient;
`old` is log pi_old, the anchor of the ratio; `rollout` is the engine's log-probability; `A` the advantage; `mask` is 1 at
sampled tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor


@dataclass
class Batch:
    """The numbers of an update."""

    logp: Tensor
    old: Tensor
    rollout: Tensor
    ref: Tensor
    A: Tensor
    mask: Tensor
    entropy: Tensor
    episode: Tensor
    """[B] int64."""
    group: Tensor
    """[B] int64."""


PolicyLoss = Callable[[Batch, Any], Tensor]


def stream_mean(x: Tensor, mask: Tensor) -> Tensor:
    """[B, 1]: mean over the sampled tokens of a stream."""
    return (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def ppo(b: Batch, s: Any) -> Tensor:
    """Schulman et al. 2017 (1707.06347) equation 7; a higher upper bound is DAPO's (2503.14476), the bound for negative
    advantages is dual clip (Ye et al. 2019, 1912.09729, equation 5)."""
    ratio = (b.logp - b.old).exp()
    objective = torch.minimum(ratio * b.A, ratio.clamp(1 - s.clip_low, 1 + s.clip_high) * b.A)
    if s.dual_clip is not None:
        objective = torch.where(b.A < 0, torch.maximum(objective, s.dual_clip * b.A), objective)
    return -objective


def reinforce(b: Batch, s: Any) -> Tensor:
    """Williams 1992: -A log pi."""
    return -b.A * b.logp


def cispo(b: Batch, s: Any) -> Tensor:
    """MiniMax-M1 (2506.13585) equations 4 and 5: the clipped ratio is a constant weight of A log pi."""
    weight = (b.logp - b.old).exp().clamp(1 - s.clip_low, 1 + s.clip_high).detach()
    return -weight * b.A * b.logp


def gspo(b: Batch, s: Any) -> Tensor:
    """Zheng et al. 2025 (2507.18071) equations 5 to 7: PPO's surrogate of the geometric mean ratio of the stream."""
    ratio = stream_mean(b.logp - b.old, b.mask).exp()
    return -torch.minimum(ratio * b.A, ratio.clamp(1 - s.clip_low, 1 + s.clip_high) * b.A)


def gspo_token(b: Batch, s: Any) -> Tensor:
    """Zheng et al. 2025 equations 13 and 14: sg(s) pi / sg(pi) at every token."""
    of_stream = stream_mean(b.logp - b.old, b.mask).exp().detach()
    ratio = of_stream * (b.logp - b.logp.detach()).exp()
    return -torch.minimum(ratio * b.A, ratio.clamp(1 - s.clip_low, 1 + s.clip_high) * b.A)


def dppo(b: Batch, s: Any) -> Tensor:
    """Divergence PPO (2602.04879): ratio x A, without gradient where the divergence of the policy from the one that sampled
    exceeds its threshold and the update would increase it. Of the sampled token and all others together, as two events:
    total variation |p - q|, or KL(q, p)."""
    ratio = (b.logp - b.rollout).exp()
    p, q = b.logp.detach().exp(), b.rollout.exp()
    if s.divergence == "tv":
        divergence = (p - q).abs()
    else:
        divergence = q * (b.rollout - b.logp.detach()) + (1 - q) * ((1 - q) / (1 - p)).log()
    leaves = ((b.A > 0) & (ratio > 1) | (b.A < 0) & (ratio < 1)) & (divergence > s.delta)
    return -torch.where(leaves, torch.zeros_like(ratio), ratio * b.A)


def sapo(b: Batch, s: Any) -> Tensor:
    """Soft adaptive policy optimization (2511.20347) equations 5 and 6: a sigmoid gate instead of the clip."""
    tau = 0 * b.A + s.negative_temperature
    tau[b.A > 0] = s.positive_temperature
    ratio = (b.logp - b.old).exp()
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * b.A


def gmpo(b: Batch, s: Any) -> Tensor:
    """Geometric-mean policy optimization (2507.20673) equation 4: log-ratios are clipped at each token, on the side that the
    sign of the stream's advantage asks for, then averaged over the stream."""
    log_ratio, A = b.logp - b.old, stream_mean(b.A, b.mask)
    clipped = log_ratio.clamp(-s.clip_low, s.clip_high)
    pessimistic = torch.where(A >= 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped))
    return (-stream_mean(pessimistic, b.mask).exp() * A).expand_as(b.A)


def gpg(b: Batch, s: Any) -> Tensor:
    """Group policy gradient (2504.02546): REINFORCE, rescaled by B / (B - M) for the M of B samples without a gradient because
    all answers to their prompt have one reward."""
    silent = torch.stack([(b.A[b.group == group] == 0).all() for group in b.group])
    return -(len(silent) / max(1, int((~silent).sum()))) * b.A * b.logp


def correction_factor(b: Batch, s: Any) -> Tensor:
    """[B, T] without gradient: factor of a token's loss for rollouts of another policy mu, with r = pi_old / mu.

    Truncated importance sampling (Yao et al. 2025): min(r, cap), of the token or of the product over the stream. Rejection
    sets it to 0 outside the bounds: of a token (IcePop, 2510.18855), of the product over the stream, or of its geometric mean
    (Liu and Li 2025, "When speed kills stability").
    """
    log_r = (b.old - b.rollout) * b.mask
    ratios = {
        "none": torch.ones_like(log_r),
        "token": log_r.exp(),
        "sequence": log_r.sum(1, keepdim=True).exp().expand_as(log_r),
        "geometric": stream_mean(log_r, b.mask).exp().expand_as(log_r),
    }
    if s.weights != "none" and s.cap is None:
        raise ValueError("the reference has no default cap; set `cap`")
    factor = ratios["none"] if s.weights == "none" else ratios[s.weights].clamp(max=s.cap)
    if s.reject != "none":
        low, high = s.bounds
        factor = factor * ((ratios[s.reject] >= low) & (ratios[s.reject] <= high))
    return factor.detach()


def kl(b: Batch, estimator: str) -> Tensor:
    """Schulman 2020, "Approximating KL divergence": estimators of KL(pi, pi_ref) from samples of pi. k3 is cut off at 10 nats,
    as in verl."""
    d = b.logp - b.ref
    if estimator == "k1":
        return d
    return d**2 / 2 if estimator == "k2" else ((-d).exp() - 1 + d).clamp(max=10)


def kl_importance_weighted(b: Batch, estimator: str) -> Tensor:
    """DeepSeek-V3.2 (2512.02556) equation 7: pi over the policy that sampled, times the estimate. The gradient passes through
    the ratio too."""
    return (b.logp - b.rollout).exp() * kl(b, estimator)


def off_policy_mask(b: Batch, threshold: float) -> Tensor:
    """[B, T]: DeepSeek-V3.2 (2512.02556) equations 8 and 9: 0 where the advantage is negative and the mean over the stream of
    log(mu / pi) exceeds the threshold, else 1. mu sampled the tokens."""
    drift = stream_mean(b.rollout - b.logp.detach(), b.mask)
    return 1 - ((b.A < 0) & (drift > threshold)).double()


def covariance(b: Batch) -> Tensor:
    """[B, T]: Cui et al. 2025 (2505.22617) equation 9, over all sampled tokens of the update, 0 elsewhere, of the log-probabilities
    before the step's first update."""
    count = b.mask.sum()
    return (b.old - (b.old * b.mask).sum() / count) * (b.A - (b.A * b.mask).sum() / count) * b.mask


def clip_cov(b: Batch, low: float, high: float) -> Tensor:
    """[B, T]: Clip-Cov (2505.22617) equations 10 and 11, where the random choice takes every token with a covariance between
    the bounds: 0 for these, else 1."""
    C = covariance(b)
    return 1 - ((low < C) & (high > C) & (b.mask > 0)).double()


def kl_cov(b: Batch, share: float, coefficient: float) -> Tensor:
    """[B, T]: KL-Cov (2505.22617) equations 12 and 13: a penalty for the tokens with the largest covariance. The estimate of the
    KL to the old policy is that of the authors' code, |log pi / pi_old|."""
    C = covariance(b).masked_fill(b.mask == 0, -torch.inf)
    count = max(1, int(share * float(b.mask.sum())))
    chosen = C.flatten().topk(count).values[-1] <= C
    return coefficient * (b.logp - b.old).abs() * chosen


def top_entropy(b: Batch, share: float) -> Tensor:
    """[B, T]: Wang et al. 2025 (2506.01939) equation 5: 1 for the share of sampled tokens with the highest entropy, else 0. The
    divisor of the mean stays."""
    H = b.entropy.detach().masked_fill(b.mask == 0, -torch.inf)
    count = math.ceil(share * float(b.mask.sum()) - 1e-9)
    return (H.flatten().topk(count).values[-1] <= H).double()


def aggregate(per_token: Tensor, b: Batch, aggregation: str, constant: float | None) -> Tensor:
    """Scalar. `token_mean`: over all sampled tokens. `sequence_mean`: mean over the tokens of an episode, then over
    episodes. `constant`: sum / constant."""
    total = per_token * b.mask
    if aggregation == "token_mean":
        return total.sum() / b.mask.sum()
    if aggregation == "constant":
        assert constant is not None
        return total.sum() / constant
    means = []
    for episode in b.episode.unique():
        rows = b.episode == episode
        if b.mask[rows].sum() > 0:
            means.append(total[rows].sum() / b.mask[rows].sum())
    return torch.stack(means).mean()


LOSSES: dict[str, PolicyLoss] = {
    "ppo": ppo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "reinforce": reinforce,
    "dppo": dppo,
    "sapo": sapo,
    "gmpo": gmpo,
    "gpg": gpg,
}
