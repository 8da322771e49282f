"""Returns from each turn on, with a discount per turn: turn_returns."""

import math
from collections.abc import Sequence

import numpy as np

from posttrain.credit.baselines.statistics import alike, members
from posttrain.credit.baselines.token_returns import reinforce


def turn_returns(rewards: Sequence[np.ndarray], discount: float) -> list[np.ndarray]:
    """G_k = sum over j >= k of discount^(j - k) r_j, the same for every token of turn k; j and k count turns.

    Unbiased for discount 1: what was earned before a turn does not depend on it. A smaller discount is biased towards
    early rewards, by choice; however long the answers are, they do not decay it.
    Source: Williams 1992; Sutton et al. 2000, "Policy gradient methods with function approximation", a turn being the
    action.

    `rewards`: per episode [K] float64, what each turn paid; `discount` in (0, 1]. Returns per episode [K] float64.
    """
    return reinforce(rewards, discount)


def minus_others(returns: Sequence[np.ndarray], groups: np.ndarray) -> list[np.ndarray]:
    """A_ik = G_ik - mean over the other episodes j of the group of G_jk, with G_jk = 0 where j had ended before k.

    Keeps `turn_returns` unbiased, also where the policy chooses when to stop: every other episode counts at every
    turn, so the baseline does not depend on episode i. A mean over those alone that came as far would not either, but
    it is missing where nobody else came. A group of one has no others and gets 0.
    Source: the leave-one-out baseline of Kool et al. 2019, at each turn.

    `returns`: per episode [K] float64; `groups` [N] int. Returns per episode [K] float64.
    """
    found = [np.zeros(len(own)) for own in returns]
    for index in members(groups):
        longest = max(len(returns[i]) for i in index)
        table = np.zeros((len(index), longest))
        for row, i in enumerate(index):
            table[row, : len(returns[i])] = returns[i]
        for turn in range(longest if len(index) > 1 else 0):
            column = table[:, turn]
            total = math.fsum(column.tolist())
            for row, i in enumerate(index):
                if turn < len(returns[i]) and not alike(column):
                    found[i][turn] = (len(index) * column[row] - total) / (len(index) - 1)
    return found
