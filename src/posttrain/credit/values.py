"""Credit from a critic's values: generalised advantage estimation.

Every array here runs over the sampled tokens of an episode alone, in order, across its streams: tokens of the
environment have no place in it. Values are those of the state before each token is sampled.
"""

import math
from collections.abc import Sequence

import numpy as np


def gae(
    rewards: Sequence[np.ndarray], values: Sequence[np.ndarray], discount: float, trace_decay: float
) -> list[np.ndarray]:
    """A_t = sum over k >= t of (discount x trace_decay)^(k - t) d_k, d_k = r_k + discount V_{k+1} - V_k.

    k and t count sampled tokens; V after the last one is 0, also where a limit ended the episode. With `discount` and
    `trace_decay` 1, A_t = G_t - V_t, whose policy gradient is unbiased whatever the values are; with the exact values
    of the policy it is so for any `trace_decay`. Otherwise errors of the values bias it.
    Source: Schulman et al. 2016, "High-dimensional continuous control using GAE", arXiv 1506.02438.

    `rewards` and `values`: per episode [n], in units of reward; `discount` and `trace_decay` in [0, 1]. Returns per
    episode [n] float64.
    """
    return [_gae(r, v, discount, trace_decay) for r, v in zip(rewards, values, strict=True)]


def _gae(rewards: np.ndarray, values: np.ndarray, discount: float, trace_decay: float) -> np.ndarray:
    found, running, after = np.zeros(len(rewards)), 0.0, 0.0
    for t in range(len(rewards) - 1, -1, -1):
        value = float(values[t])
        running = float(rewards[t]) + discount * after - value + discount * trace_decay * running
        found[t], after = running, value
    return found


def explained_variance(returns: np.ndarray, values: np.ndarray) -> float:
    """1 - var(G - V) / var(G) over [n] tokens: 1 for perfect values, 0 for constant ones; NaN where all G are alike."""
    spread = float(np.var(returns)) if len(returns) else 0.0
    return 1 - float(np.var(returns - values)) / spread if spread > 1e-12 else math.nan
