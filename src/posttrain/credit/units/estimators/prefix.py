"""Credit from the values of an answer's beginnings.

`values` [K + 1] everywhere: Phi_0 of the empty answer, Phi_k of the answer up to and with unit k, and Phi_K = R of the
whole answer, as the reward model gives them, normalised.
"""

import numpy as np


def prefix(values: np.ndarray) -> np.ndarray:
    """d_k = Phi_k - Phi_(k-1): [K] float64, a reward stream that sums to R - Phi_0.

    Potential-based shaping with the potential Phi (Ng, Harada, Russell 1999), so it moves when reward arrives and not
    which policy is best; beginnings of answers are rare in the training of a reward model that reads ends.
    Unbiased, paid at the end of units, whatever Phi is: the return from unit k on is R - beta Phi_(k-1), a baseline of
    what stood before. Biased as an advantage, which would not see what a unit does to later ones.
    """
    return np.diff(np.asarray(values, dtype=np.float64))


def trunc(values: np.ndarray) -> np.ndarray:
    """d_k = R - Phi_(k-1): [K] float64, an advantage: the return minus a baseline that knows what stood before unit k.

    Unbiased, whatever Phi is, as long as the cut before unit k is made by what stood before it. As a reward, where it is
    biased, it would pay unit j of additive worth w_j j times over.
    """
    values = np.asarray(values, dtype=np.float64)
    return values[-1] - values[:-1]
