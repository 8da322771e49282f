"""Groups within groups: an episode against its group, and a turn against the turns played in the same state: gigpo."""

from collections.abc import Hashable, Sequence

import numpy as np

from posttrain.credit.baselines.statistics import centred, members, standardised
from posttrain.credit.turns.turn_returns import turn_returns
from posttrain.credit.turns.turns import split_by


def gigpo(
    rewards: Sequence[np.ndarray],
    states: Sequence[Sequence[Hashable]],
    groups: np.ndarray,
    discount: float,
    step_weight: float,
    divide: bool,
) -> list[np.ndarray]:
    """A_ik = S(R_i; episodes of the group) + step_weight x S(G_ik; turns of the group in the same state).

    R_i is the sum of the turns' rewards, G_ik = sum over j >= k of discount^(j - k) r_ij. S(x; set) is x - mean of the
    set, over (std + 1e-6) with the sample standard deviation (n - 1) where `divide`; 0 for a set of one or of equal
    values, so a state that nobody came back to leaves the first part alone. One episode may visit a state twice; both
    turns are in the set.
    Source: Feng et al. 2025, "Group-in-group policy optimization", arXiv 2505.10978: R undiscounted, G discounted per
    turn, `step_weight` its omega; `divide` false is its normaliser of 1, the default of its code. Different on purpose:
    a group of one episode has no comparison and gets 0, not its return, and G counts what R counts, such as a KL
    penalty in the rewards, where the code counts the environment's rewards alone.

    Biased: the spread divides; without it, a state counts the more the oftener it repeats, which tilts the direction.
    It assumes that equal keys are equal states, the turns left included: where time matters and the key leaves it
    out, turns are compared that could not have earned the same. Without repeated states it is grpo (or dr_grpo).

    `rewards`: per episode [K] float64; `states`: per episode K keys; `groups` [N] int. Returns per episode [K] float64.
    """
    counts = [len(own) for own in rewards]
    owners = np.repeat(np.arange(len(rewards)), counts)
    turns = np.concatenate([np.zeros(0), *turn_returns(rewards, discount)])
    numbers: dict[Hashable, int] = {}
    anchors = np.array(
        [
            numbers.setdefault((int(group), key), len(numbers))
            for group, keys, count in zip(groups, states, counts, strict=True)
            for key in _as_many(keys, count)
        ],
        dtype=np.int64,
    )
    totals = np.array([own.sum() for own in rewards], dtype=np.float64)
    of_episodes = _relative(totals, groups, divide)[owners]
    return split_by(counts, of_episodes + step_weight * _relative(turns, anchors, divide))


def _relative(values: np.ndarray, sets: np.ndarray, divide: bool) -> np.ndarray:
    found = np.zeros(len(values))
    for index in members(sets):
        found[index] = standardised(values[index], correction=1) if divide else centred(values[index])
    return found


def _as_many(keys: Sequence[Hashable], count: int) -> Sequence[Hashable]:
    if len(keys) != count:
        raise ValueError(f"{len(keys)} state keys for {count} turns")
    return keys
