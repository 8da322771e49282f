"""The loss of a reward model: one value per pair, to be divided once by the learner."""

import torch
import torch.nn.functional as F


def bradley_terry(
    chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor | None, centring: float
) -> torch.Tensor:
    """L = -log sigmoid(c - r - margin) + centring (c + r)^2 of each pair: [P], differentiable, not reduced.

    `chosen`, `rejected` [P] float: the scores c and r of the two answers, without unit; `margin` [P] float: what the
    chosen score must lead by, 0 where a row has none; None is 0 everywhere. A difference of scores is the log-odds of
    being preferred; adding a constant to both changes nothing but the centring term, which makes their mean 0.

    Sources: Bradley and Terry 1952, "Rank analysis of incomplete block designs"; margin: Touvron et al. 2023,
    "Llama 2", arXiv 2307.09288, equation 2; centring: Eisenstein et al. 2023, "Helping or herding?", arXiv 2312.09244,
    equation 2.
    """
    lead = chosen - rejected if margin is None else chosen - rejected - margin
    return -F.logsigmoid(lead) + centring * (chosen + rejected) ** 2
