"""The baseline of the other episodes of the group: rloo."""

from collections.abc import Mapping

import numpy as np

from posttrain.credit.baselines.statistics import centred, members


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
