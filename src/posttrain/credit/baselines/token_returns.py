"""Credit from each sampled token on: reinforce, reinforce_pp, reinforce_pp_baseline.

Every array here runs over the sampled tokens of an episode alone, in order, across its streams: tokens of the
environment have no place in it, so they neither earn nor decay credit.
"""

from collections.abc import Sequence

import numpy as np

from posttrain.credit.baselines.group_mean import dr_grpo
from posttrain.credit.baselines.statistics import standardised


def reinforce(rewards: Sequence[np.ndarray], discount: float) -> list[np.ndarray]:
    """A_t = sum over k >= t of discount^(k - t) r_k, k and t counting sampled tokens.

    Unbiased for discount 1; a smaller discount is biased towards early rewards, by choice.
    Source: Williams 1992; Sutton et al. 2000, "Policy gradient methods with function approximation".

    `rewards`: per episode [n] float64; `discount` in (0, 1]. Returns per episode [n] float64.
    """
    return [_returns(episode, discount) for episode in rewards]


def reinforce_pp(rewards: Sequence[np.ndarray], discount: float) -> list[np.ndarray]:
    """`reinforce`, then whitened: (A - mean) / (std + 1e-6) over all sampled tokens of the batch.

    Biased: mean and spread come from the batch itself.
    Source: Hu et al. 2025, "REINFORCE++", arXiv 2501.03262.

    `rewards`: per episode [n] float64; `discount` in (0, 1]. Returns per episode [n] float64.
    """
    return whitened(reinforce(rewards, discount))


def reinforce_pp_baseline(returns: np.ndarray, groups: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """A_t = R_i - mean_g at each sampled token of episode i, then whitened over all sampled tokens of the batch.

    Biased, as `reinforce_pp`. A group of one enters the whitening with 0.
    Source: Hu et al. 2025, "REINFORCE++", arXiv 2501.03262, the variant with a group baseline.

    `returns` [N] float64, `groups` [N] int, `lengths` [N] int: sampled tokens. Returns per episode [n] float64.
    """
    advantages = dr_grpo(returns, groups, lengths, {})
    return whitened([np.full(length, a) for a, length in zip(advantages, lengths.tolist(), strict=True)])


def _returns(rewards: np.ndarray, discount: float) -> np.ndarray:
    found, running = np.zeros(len(rewards)), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        running = float(rewards[t]) + discount * running
        found[t] = running
    return found


def whitened(episodes: list[np.ndarray]) -> list[np.ndarray]:
    """(A - mean) / (std + 1e-6) over all tokens of `episodes`, each [n].

    Each token counts once, so long episodes count more; the variance is that of the population.
    """
    if not episodes:
        return []
    ends = np.cumsum([len(episode) for episode in episodes])[:-1]
    return np.split(standardised(np.concatenate(episodes), correction=0), ends)
