"""The baseline of the policy's greedy episode: remax."""

from collections.abc import Mapping

import numpy as np

from posttrain.errors import RunError


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
