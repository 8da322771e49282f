"""Estimators of unit credit from reward-model values.

`values` [K + 1] are the normalized values of an answer's prefixes: Phi_0 of the empty answer, Phi_k of the answer up to
and including unit k, and Phi_K = R of the whole answer.
"""

import numpy as np


def prefix(values: np.ndarray) -> np.ndarray:
    """d_k = Phi_k - Phi_(k-1): [K] float64, a reward stream that sums to R - Phi_0.

    Potential-based shaping with the potential Phi (Ng, Harada, Russell 1999): it changes when reward arrives, but not
    which policy is optimal. Reward models trained on whole answers rarely see such prefixes.
    Unbiased for any Phi if placed at the end of units: the return from unit k on is R - beta Phi_(k-1), which is a
    baseline that depends on the past only. Spans that are not units, such as a thinking block, have their increase too,
    because the sum would otherwise depend on them. Biased as an advantage, which would ignore effects on later units.
    """
    return np.diff(np.asarray(values, dtype=np.float64))


def loo(outcome: float, without: np.ndarray) -> np.ndarray:
    """d_k = R - Phi(answer without unit k): [K] float64 for `without` [K].

    Does not sum to R - Phi_0: if either of two units suffices, both get 0; if both are needed, each gets the full
    difference. Unbiased if units do not depend on each other. Otherwise biased, because the answer without unit k still
    contains later units that were sampled given unit k.
    """
    return outcome - np.asarray(without, dtype=np.float64)
