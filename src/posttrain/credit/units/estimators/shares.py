"""Credit that divides the outcome R among the K units of an answer: reward streams [K] float64 that sum to R.

`last` is unbiased. The others are biased where credit is what is paid from a token on: shares of earlier units, which
later ones had a part in, are left out.
"""

import numpy as np


def even(outcome: float, units: int) -> np.ndarray:
    """d_k = R / K."""
    return np.full(units, outcome / max(units, 1))


def last(outcome: float, units: int) -> np.ndarray:
    """d_K = R, and 0 for the other units."""
    shares = np.zeros(units)
    shares[-1:] = outcome
    return shares


def attention(outcome: float, weights: np.ndarray) -> np.ndarray:
    """d_k = R a_k / sum of a, for attention a [K] >= 0 that the reward model pays to each unit where it reads R.

    Source: Chan et al. 2024, "Dense reward for free in RLHF" (ABC), arXiv 2402.00782. Even where no unit is attended
    to.
    """
    total = float(np.sum(weights))
    return even(outcome, len(weights)) if total <= 0 else outcome * np.asarray(weights, dtype=np.float64) / total
