"""The baseline of least variance under a gradient that grows with length: opo."""

import math
from collections.abc import Mapping

import numpy as np

from posttrain.credit.baselines.statistics import alike, members


def opo(returns: np.ndarray, groups: np.ndarray, lengths: np.ndarray, greedy: Mapping[int, float]) -> np.ndarray:
    """A_i = R_i - (sum_j l_j R_j / sum_j l_j), over the episodes j of the group, l_j their sampled tokens.

    Biased: the baseline includes the episode's own return and its own length; the bias falls with the group's size.
    A group of one, or one whose returns are all equal, gets 0.
    Source: Hao et al. 2025, "On-policy RL with optimal reward baseline", arXiv 2505.23585.

    `returns` [N] float64, `groups` [N] int, `lengths` [N] int, at least 1 in each group in sum; `greedy` is not used.
    Returns [N] float64.
    """
    advantages = np.zeros(len(returns))
    for index in members(groups):
        values, weights = returns[index], lengths[index]
        if not alike(values):
            advantages[index] = values - math.fsum((values * weights).tolist()) / float(weights.sum())
    return advantages
