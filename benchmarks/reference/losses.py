"""Policy losses, corrections, KL penalties and their mean, from the papers. All tensors are [B, T] float64.

Each loss gives one number per token, to be minimized. Notation: `logp` is log pi of the policy in training, with gradient;
`old` is log pi_old, the anchor of the ratio; `rollout` is the engine's log-probability; `A` the advantage; `mask` is 1 at
sampled tokens.
"""

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
    """Divergence PPO (2602.04879): ratio x A, without gradient where the divergence of the policy from the anchor exceeds
    its threshold and the update would increase it. Binary total variation: |pi - pi_old| of the sampled token."""
    ratio = (b.logp - b.old).exp()
    change = (b.logp.exp() - b.old.exp()).detach()
    leaves_up = (b.A > 0) & (change > s.clip_high)
    leaves_down = (b.A < 0) & (change < -s.clip_low)
    return -torch.where(leaves_up | leaves_down, torch.zeros_like(ratio), ratio * b.A)


def sapo(b: Batch, s: Any) -> Tensor:
    """Soft adaptive policy optimization (2511.20347) equations 5 and 6: a sigmoid gate instead of the clip."""
    tau = torch.where(b.A > 0, torch.full_like(b.A, s.tau_pos), torch.full_like(b.A, s.tau_neg))
    ratio = (b.logp - b.old).exp()
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * b.A


def gmpo(b: Batch, s: Any) -> Tensor:
    """Geometric-mean policy optimization (2507.20673) equations 4 and 5: log-ratios are clipped at each token, on the side
    that the sign of the advantage asks for, then averaged over the stream."""
    log_ratio = b.logp - b.old
    clipped = log_ratio.clamp(-s.clip_low, s.clip_high)
    pessimistic = torch.where(b.A >= 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped))
    return -stream_mean(pessimistic, b.mask).exp() * b.A


def weights_of_correction(b: Batch, kind: str, level: str, cap: float) -> Tensor:
    """[B, T] without gradient. w = pi_old / mu at the token, the product over a stream, or its geometric mean.

    Truncated importance sampling (Yao et al. 2025): min(w, cap). Masked (IcePop, Ling team 2025): w within [1/cap, cap],
    else 0.
    """
    log_w = (b.old - b.rollout) * b.mask
    if level == "sequence":
        log_w = log_w.sum(1, keepdim=True).expand_as(log_w)
    elif level == "geometric":
        log_w = stream_mean(log_w, b.mask).expand_as(log_w)
    w = log_w.exp().detach()
    return w.clamp(max=cap) if kind == "tis" else torch.where((w <= cap) & (w >= 1 / cap), w, torch.zeros_like(w))


def kl(b: Batch, estimator: str) -> Tensor:
    """Schulman 2020, "Approximating KL divergence": estimators of KL(pi, pi_ref) from samples of pi."""
    d = b.logp - b.ref
    if estimator == "k1":
        return d
    return d**2 / 2 if estimator == "k2" else (-d).exp() - 1 + d


def kl_importance_weighted(b: Batch, estimator: str) -> Tensor:
    """DeepSeek-V3.2 (2512.02556) equation 7: pi / pi_old times the estimate; the gradient passes through the ratio too."""
    return (b.logp - b.old).exp() * kl(b, estimator)


def off_policy_mask(b: Batch, threshold: float) -> Tensor:
    """[B, 1]: DeepSeek-V3.2 (2512.02556) equation 9: 0 for a stream of negative advantage whose mean log-ratio of the sampling
    policy to the present one exceeds the threshold, else 1. The sign is that of the stream's mean advantage."""
    drift = stream_mean(b.rollout - b.logp.detach(), b.mask)
    return 1 - ((stream_mean(b.A, b.mask) < 0) & (drift > threshold)).double()


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
}
