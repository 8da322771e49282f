"""Losses of reward models, one value per pair or per answer, and of critics, one per sampled token. The learner divides their
sum once per optimizer step."""

from typing import Literal

import torch
import torch.nn.functional as F


def bradley_terry(
    chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor | None, centring: float
) -> torch.Tensor:
    """L = -log sigmoid(c - r - margin) + centring (c + r)^2 of each pair: [P], differentiable, not reduced.

    `chosen`, `rejected` [P] float: the scores c and r of the two answers, unitless. `margin` [P] float: the required
    difference of the scores, 0 for rows without one; None means 0 everywhere. A difference of scores is the log-odds of
    being preferred. A constant added to both scores changes only the centring term, which drives their mean to 0.

    Sources: Bradley and Terry 1952, "Rank analysis of incomplete block designs"; margin: Touvron et al. 2023,
    "Llama 2", arXiv 2307.09288, equation 2; centring: Eisenstein et al. 2023, "Helping or herding?", arXiv 2312.09244,
    equation 2.
    """
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    return -F.logsigmoid(difference) + centring * (chosen + rejected) ** 2


def unit_means(rewards: torch.Tensor, answer: torch.Tensor, answers: int) -> torch.Tensor:
    """[S]: mean reward of each answer's units. For a single unit this is its reward, bit for bit.

    Source: Yin et al. 2025, "Segmenting text and learning their rewards for improved RLHF", arXiv 2501.02790, where
    the difference of two such means is the log-odds of a Bradley-Terry model.
    """
    return _sums(rewards, answer, answers) / _counts(rewards, answer, answers)


def unit_entropies(rewards: torch.Tensor, answer: torch.Tensor, answers: int) -> torch.Tensor:
    """[S], nats: H = -sum p log p of p = softmax of the rewards of each answer's K units.

    Ranges from 0 (one unit has all the weight) to log K (all equal); exp(H) is the effective number of units. The
    gradient is dH/dr = -p (log p + H): it sums to 0 over the units, so H does not change the answer's mean.
    """
    top = torch.full((answers,), -torch.inf, dtype=rewards.dtype, device=rewards.device)
    top = top.scatter_reduce(0, answer, rewards.detach(), "amax")
    shifted = rewards - top[answer]
    weights = shifted.exp()
    total = _sums(weights, answer, answers)
    return total.log() - _sums(weights * shifted, answer, answers) / total


def unit_entropy_penalty(
    rewards: torch.Tensor, answer: torch.Tensor, answers: int, form: Literal["length_fair", "published"]
) -> torch.Tensor:
    """[S]: entropy regularizer of the distribution of rewards over each answer's units, without its coefficient.

    `published`: -H / K. Its range, log K / K, falls from 0.37 for 3 units to 0.11 for 30, so long answers are barely
    regularized. `length_fair`: 1 - H / log K, which is KL(p || uniform) / log K: 0 for equal rewards and 1 if one unit
    has all the weight, for any K. Both are 0 for K = 1.

    Source of `published`: N. Parikh 2026, LearningSegmentRewards, whose loss is that of Bradley and Terry minus
    coefficient x (mean H / K of the chosen + mean H / K of the rejected answers).
    """
    entropies, counts = unit_entropies(rewards, answer, answers), _counts(rewards, answer, answers)
    if form == "published":
        return -entropies / counts
    several = counts > 1
    # The branch that is not selected would have a NaN gradient for log 1 = 0.
    return torch.where(several, 1 - entropies / torch.where(several, counts, 2.0).log(), torch.zeros_like(entropies))


def unit_stds(rewards: torch.Tensor, answer: torch.Tensor, answers: int) -> torch.Tensor:
    """[S]: population standard deviation of the rewards of each answer's units; 0 for a single unit."""
    distances = rewards - unit_means(rewards, answer, answers)[answer]
    return (_sums(distances**2, answer, answers) / _counts(rewards, answer, answers)).sqrt()


def value_loss(
    values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """L_t = max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2) / 2 of each token: [N], not reduced.

    `values` [N] float, differentiable: the current V. `old` [N]: V before the step's updates. `returns` [N]: R, the
    targets. All are in units of reward. A value that has moved towards its return by more than `clip` has gradient 0.
    `clip` None gives half the squared error. The second result, [N] bool, is true where the clipped term is larger.
    Source: the second published implementation of Schulman et al. 2017, arXiv 1707.06347;
    the paper itself does not clip values.
    """
    plain = (values - returns) ** 2
    if clip is None:
        return plain / 2, torch.zeros_like(values, dtype=torch.bool)
    clipped = (old + (values - old).clamp(-clip, clip) - returns) ** 2
    return torch.maximum(plain, clipped) / 2, clipped > plain


def _sums(values: torch.Tensor, answer: torch.Tensor, answers: int) -> torch.Tensor:
    return torch.zeros(answers, dtype=values.dtype, device=values.device).index_add(0, answer, values)


def _counts(rewards: torch.Tensor, answer: torch.Tensor, answers: int) -> torch.Tensor:
    return _sums(torch.ones_like(rewards), answer, answers)
