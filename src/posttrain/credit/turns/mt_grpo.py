"""Group statistics of turn rewards and of the outcome: mt_grpo."""

from collections.abc import Sequence

import numpy as np

from posttrain.credit.baselines.statistics import members, standardised


def mt_grpo(rewards: Sequence[np.ndarray], groups: np.ndarray, turn_weight: float) -> list[np.ndarray]:
    """A_ik = S_g(o_i) + turn_weight x S_g(r_ik) for turns before the last, A_iK = S_g(o_i) for the last one.

    r_ik is what turn k paid, o_i what the last turn paid (the outcome), and S_g(x) = (x - mean) / (std + 1e-6) with
    the sample standard deviation (n - 1) over the episodes of the group: for r_ik over those for which turn k is not
    the last. Where only one such episode is left, or all are equal, S_g is 0.
    Source: Zeng et al. 2025, "Reinforcing multi-turn reasoning in LLM agents", arXiv 2505.11821, with the weight where
    its code has it (turn_advantage_coef). Different on purpose: it has two turns, told apart by the first result of a
    tool, and here every turn before the last is treated as its first; an episode of one turn, where no tool was asked,
    has S_g of its outcome, not of the sum of both rewards, and is not in the statistics of a turn that it did not
    play; the small number beside std is 1e-6 as elsewhere, not 1e-4.

    It assumes that the last turn pays the outcome and every episode of a group has the same number of turns. Biased in
    any case: the group's own spread divides; a turn gets no credit for the rewards of later turns but the last; and
    where the policy chooses when to stop, a turn is compared with those that went on, which rewards or punishes
    stopping itself. `turn_returns` with a baseline does none of this.

    `rewards`: per episode [K] float64; `groups` [N] int. Returns per episode [K] float64.
    """
    found = [np.zeros(len(own)) for own in rewards]
    for index in members(groups):
        played = [int(i) for i in index if len(rewards[i])]
        outcomes = standardised(np.array([rewards[i][-1] for i in played]), correction=1)
        for i, outcome in zip(played, outcomes.tolist(), strict=True):
            found[i][:] = outcome
        for turn in range(max((len(rewards[i]) for i in played), default=1) - 1):
            going_on = [i for i in played if len(rewards[i]) > turn + 1]
            scores = standardised(np.array([rewards[i][turn] for i in going_on]), correction=1)
            for i, score in zip(going_on, scores.tolist(), strict=True):
                found[i][turn] += turn_weight * score
    return found
