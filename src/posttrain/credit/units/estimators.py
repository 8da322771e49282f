"""Credit from the values of an answer's beginnings.

`values` [K + 1] everywhere: Phi_0 of the empty answer, Phi_k of the answer up to and with unit k, and Phi_K = R of the
whole answer, as the reward model gives them, normalized.
"""

from collections.abc import Mapping, Sequence
from math import factorial

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


def full_coalition(units: int) -> int:
    """The coalition of all K units."""
    return (1 << units) - 1


def leave_one_out_coalitions(units: int) -> list[int]:
    """[K]: the coalitions that lack unit 0, 1, ..., K - 1."""
    return [full_coalition(units) & ~(1 << k) for k in range(units)]


def loo(outcome: float, without: np.ndarray) -> np.ndarray:
    """d_k = R - Phi(answer without unit k): [K] float64 for `without` [K].

    Does not sum to R - Phi_0: of two units of which either is enough, both get 0; where both are needed, both get all.
    Unbiased where units do not depend on each other; else biased, for the answer without unit k holds later units that
    would have been others without it.
    """
    return outcome - np.asarray(without, dtype=np.float64)


def sample_orders(units: int, permutations: int, random: np.random.Generator) -> list[np.ndarray] | None:
    """Orders [K] in which units join; each second one is the one before it backwards, which lowers the variance.

    None where all 2^K coalitions cost no more than those of the orders: then every coalition is to be valued.
    Source of the pairs: Mitchell et al. 2022, "Sampling permutations for Shapley value estimation".
    """
    if units <= 1 or 2**units - 2 <= permutations * (units - 1):
        return None
    found: list[np.ndarray] = []
    while len(found) < permutations:
        order = random.permutation(units)
        found += [order, order[::-1]]
    return found[:permutations]


def coalitions(units: int, chosen: Sequence[np.ndarray] | None) -> list[int]:
    """The coalitions to be valued, rising, without the empty and the whole one: those on the way of the `orders`."""
    if chosen is None:
        return list(range(1, full_coalition(units)))
    found: set[int] = set()
    for order in chosen:
        joined = 0
        for unit in order.tolist()[:-1]:
            joined |= 1 << unit
            found.add(joined)
    return sorted(found)


def shapley(units: int, chosen: Sequence[np.ndarray] | None, values: Mapping[int, float]) -> np.ndarray:
    """phi_k = the mean of Phi(S with k) - Phi(S) over the ways in which k may join: [K] float64, sums to R - Phi_0.

    Biased, for a share of the outcome is no return: unbiased only where worth adds up and units do not depend on each
    other. With sampled orders right on average.
    `chosen`: the `orders`; with None over all of them, exactly: sum over S without k of |S|! (K - |S| - 1)! / K! times
    the difference. `values`: of the `coalitions`, the empty (0) and the whole one.
    Source: Shapley 1953; for sampled orders Castro et al. 2009, "Polynomial calculation of the Shapley value".
    """
    found = np.zeros(units)
    if chosen is None:
        weights = [factorial(s) * factorial(units - s - 1) / factorial(units) for s in range(units)]
        for members in range(1 << units):
            for unit in range(units):
                if not members >> unit & 1:
                    gain = values[members | 1 << unit] - values[members]
                    found[unit] += weights[members.bit_count()] * gain
        return found
    for order in chosen:
        joined = 0
        for unit in order.tolist():
            found[unit] += values[joined | 1 << unit] - values[joined]
            joined |= 1 << unit
    return found / len(chosen)
