"""Sums that do not depend on order, shared by the baselines."""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from posttrain.errors import RunError

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


def mean(values: np.ndarray) -> float:
    """Mean of [n] values, n > 0, the same bits in any order: `math.fsum` rounds once."""
    return math.fsum(values.tolist()) / len(values)


def alike(values: np.ndarray) -> bool:
    """Whether [n] values are all equal, or differ by no more than float32 rewards round (1e-6 of the larger)."""
    return len(values) == 0 or math.isclose(values.min(), values.max(), rel_tol=1e-6)


def centred(values: np.ndarray) -> np.ndarray:
    """[n] values minus their mean; exactly 0 where all are alike, so that a group without signal stays without."""
    if alike(values):
        return np.zeros(len(values))
    return values - mean(values)


def standardised(values: np.ndarray, correction: int) -> np.ndarray:
    """[n] values minus mean, over (standard deviation + 1e-6); exactly 0 where all are alike.

    `correction`: 1 divides the variance by n - 1 (sample), 0 by n (population).
    """
    deviations = centred(values)
    if not deviations.any():
        return deviations
    variance = math.fsum((deviations**2).tolist()) / (len(values) - correction)
    return deviations / (math.sqrt(variance) + EPSILON)


def members(groups: np.ndarray) -> Iterator[np.ndarray]:
    """For each distinct id in `groups` [N] int: the indices that carry it."""
    for group in np.unique(groups):
        yield np.flatnonzero(groups == group)


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
    divides the loss by a constant: `loss.aggregation: constant`.
    Source: Liu et al. 2025, "Understanding R1-Zero-like training", arXiv 2503.20783.

    `returns` [N] float64, `groups` [N] int; `lengths` and `greedy` are not used. Returns [N] float64.
    """
    advantages = np.zeros(len(returns))
    for index in members(groups):
        advantages[index] = centred(returns[index])
    return advantages


def rloo(returns: np.ndarray, groups: np.ndarray, lengths: np.ndarray, greedy: Mapping[int, float]) -> np.ndarray:
    """A_i = R_i - mean of the other returns of the group = n / (n - 1) (R_i - mean_g).

    Unbiased: the baseline does not depend on episode i. A group of one has no others and gets 0, which drops it from
    the update.
    Source: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; Ahmadian et al. 2024,
    "Back to basics", arXiv 2402.14740.

    `returns` [N] float64, `groups` [N] int; `lengths` and `greedy` are not used. Returns [N] float64.
    """
    advantages = np.zeros(len(returns))
    for index in members(groups):
        others = max(len(index) - 1, 1)
        advantages[index] = centred(returns[index]) * len(index) / others
    return advantages


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


def remax(returns: np.ndarray, groups: np.ndarray, lengths: np.ndarray, greedy: Mapping[int, float]) -> np.ndarray:
    """A_i = R_i - return of one greedy episode of the same task.

    Unbiased: the greedy episode does not depend on the sampled ones. Works with groups of one. A KL penalty in the
    reward is in R_i and not in the greedy return, which shifts the baseline and nothing else.
    Source: Li et al. 2023, "ReMax", arXiv 2310.10505.

    `returns` [N] float64, `groups` [N] int, `greedy` group id -> return; `lengths` is not used. Returns [N] float64.
    RunError for a group without a greedy return.
    """
    missing = sorted(set(groups.tolist()) - set(greedy))
    if missing:
        raise RunError(f"credit.type remax needs a greedy episode of every group; group {missing[0]} has none")
    return returns - np.array([greedy[group] for group in groups.tolist()], dtype=np.float64)


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
