"""Baselines that compare an episode with its group, its own return included: grpo, dr_grpo."""

from collections.abc import Mapping

import numpy as np

from posttrain.credit.baselines.statistics import centred, members, standardised


def grpo(returns: np.ndarray, groups: np.ndarray, lengths: np.ndarray, greedy: Mapping[int, float]) -> np.ndarray:
    """A_i = (R_i - mean_g) / (std_g + 1e-6), with the sample standard deviation (n - 1) of group g.

    Biased: dividing by the group's own spread weighs tasks by how hard they are and bends the gradient where returns
    take more than two values. A group of one, or one whose returns are all equal, gets 0.
    Source: Shao et al. 2024, "DeepSeekMath", arXiv 2402.03300, equation for outcome supervision.

    `returns` [N] float64, `groups` [N] int; `lengths` and `greedy` are not used. Returns [N] float64.
    """
    advantages = np.zeros(len(returns))
    for index in members(groups):
        advantages[index] = standardised(returns[index], correction=1)
    return advantages


def dr_grpo(returns: np.ndarray, groups: np.ndarray, lengths: np.ndarray, greedy: Mapping[int, float]) -> np.ndarray:
    """A_i = R_i - mean_g.

    Unbiased up to the factor (n - 1) / n of a group of n, since R_i is in its own baseline: it is rloo times that
    factor. With groups of different sizes the factors differ. A group of one gets 0. The published algorithm also
    divides the loss by a constant: `loss.normaliser: constant`.
    Source: Liu et al. 2025, "Understanding R1-Zero-like training", arXiv 2503.20783.

    `returns` [N] float64, `groups` [N] int; `lengths` and `greedy` are not used. Returns [N] float64.
    """
    advantages = np.zeros(len(returns))
    for index in members(groups):
        advantages[index] = centred(returns[index])
    return advantages
