"""Baselines that look at no group: brpo, arpo."""

from collections.abc import Mapping

import numpy as np

from posttrain.credit.baselines.statistics import standardised


def brpo(returns: np.ndarray, groups: np.ndarray, lengths: np.ndarray, greedy: Mapping[int, float]) -> np.ndarray:
    """A_i = (R_i - mean_B) / (std_B + 1e-6) over the whole batch B, with the sample standard deviation (n - 1).

    Biased, as grpo is: the batch's own spread is the divisor. A batch of one, or of equal returns, gets 0.
    Source: RAGEN, Wang et al. 2025, arXiv 2504.20073, whose first release calls it batch-relative.

    `returns` [N] float64; `groups`, `lengths` and `greedy` are not used. Returns [N] float64.
    """
    return standardised(returns, correction=1)


def arpo(returns: np.ndarray, groups: np.ndarray, lengths: np.ndarray, greedy: Mapping[int, float]) -> np.ndarray:
    """A_i = R_i.

    Unbiased, with the variance that a baseline is there to remove.
    Source: Williams 1992, "Simple statistical gradient-following algorithms"; the name is RAGEN's first release's.

    `returns` [N] float64; `groups`, `lengths` and `greedy` are not used. Returns [N] float64.
    """
    return returns.astype(np.float64)
