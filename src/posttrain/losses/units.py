"""Rewards of units: the score of an answer, and how evenly an answer's rewards are spread over its units.

Everywhere `rewards` [U] float are those of all units of S answers, without unit, `answer` [U] int64 the answer that each
belongs to, from 0 to S - 1, and every answer has a unit. Differentiable, not reduced.
"""

from typing import Literal

import torch


def unit_means(rewards: torch.Tensor, answer: torch.Tensor, answers: int) -> torch.Tensor:
    """[S]: mean of the rewards of each answer's units; that of a single unit is its reward, bit for bit.

    Source: Yin et al. 2025, "Segmenting text and learning their rewards for improved RLHF", arXiv 2501.02790, where
    the difference of two such means is the log-odds of a Bradley-Terry model.
    """
    return _sums(rewards, answer, answers) / _counts(rewards, answer, answers)


def unit_entropies(rewards: torch.Tensor, answer: torch.Tensor, answers: int) -> torch.Tensor:
    """[S], nats: H = -sum p log p of p = softmax of the rewards of each answer's K units.

    From 0 (one unit has all) to log K (all alike); exp(H) is the number of units that share the reward. The gradient
    is dH/dr = -p (log p + H): it sums to 0 over the units, so H never moves the answer's mean.
    """
    top = torch.full((answers,), -torch.inf, dtype=rewards.dtype, device=rewards.device)
    top = top.scatter_reduce(0, answer, rewards.detach(), "amax")
    shifted = rewards - top[answer]
    weights = shifted.exp()
    total = _sums(weights, answer, answers)
    return total.log() - _sums(weights * shifted, answer, answers) / total


def unevenness(
    rewards: torch.Tensor, answer: torch.Tensor, answers: int, form: Literal["length_fair", "published"]
) -> torch.Tensor:
    """[S]: what the credit-distribution entropy regulariser adds to the loss for each answer, before its coefficient.

    `published`: -H / K. Its range, log K / K, falls from 0.37 for 3 units to 0.11 for 30, so long answers are hardly
    regularised. `length_fair`: 1 - H / log K, which is KL(p || uniform) / log K: 0 for even rewards, 1 where one
    unit has all, whatever K. Both are 0 for K = 1, where there is nothing to spread.

    Source of `published`: N. Parikh 2026, LearningSegmentRewards, whose loss is that of Bradley and Terry minus
    coefficient x (mean H / K of the chosen + mean H / K of the rejected answers).
    """
    entropies, counts = unit_entropies(rewards, answer, answers), _counts(rewards, answer, answers)
    if form == "published":
        return -entropies / counts
    several = counts > 1
    # log 1 = 0 would make the gradient of what is not chosen NaN.
    return torch.where(several, 1 - entropies / torch.where(several, counts, 2.0).log(), torch.zeros_like(entropies))


def unit_spreads(rewards: torch.Tensor, answer: torch.Tensor, answers: int) -> torch.Tensor:
    """[S]: population standard deviation of the rewards of each answer's units; 0 for a single unit."""
    distances = rewards - unit_means(rewards, answer, answers)[answer]
    return (_sums(distances**2, answer, answers) / _counts(rewards, answer, answers)).sqrt()


def _sums(values: torch.Tensor, answer: torch.Tensor, answers: int) -> torch.Tensor:
    return torch.zeros(answers, dtype=values.dtype, device=values.device).index_add(0, answer, values)


def _counts(rewards: torch.Tensor, answer: torch.Tensor, answers: int) -> torch.Tensor:
    return torch.bincount(answer, minlength=answers).to(rewards.dtype)
