"""Estimators of unit credit from reward-model values.

`values` [K + 1] are the normalized values of an answer's prefixes: Phi_0 of the empty answer, Phi_k of the answer up to
and including unit k, and Phi_K = R of the whole answer. A coalition of units is an int whose bit k is set for unit k.
"""

from collections.abc import Mapping, Sequence
from math import factorial

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


def trunc(values: np.ndarray) -> np.ndarray:
    """d_k = R - Phi_(k-1): [K] float64, an advantage: the return minus a baseline that depends on the past of unit k.

    Unbiased for any Phi, provided that the start of unit k depends on the text before it only and that every token is in
    a unit; the mixture gives other tokens the outcome's share alone. Biased as a reward,
    which would count unit j of additive value w_j j times.
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
    """d_k = R a_k / sum of a, for the attention a [K] >= 0 from the token where the reward model reads R to each unit.

    Source: Chan et al. 2024, "Dense reward for free in RLHF" (ABC), arXiv 2402.00782. Equal shares if
    all weights are 0.
    """
    total = float(np.sum(weights))
    return even(outcome, len(weights)) if total <= 0 else outcome * np.asarray(weights, dtype=np.float64) / total


def full_coalition(units: int) -> int:
    """The coalition of all units."""
    return (1 << units) - 1


def leave_one_out_coalitions(units: int) -> list[int]:
    """[K]: the coalitions without unit 0, 1, ..., K - 1."""
    return [full_coalition(units) & ~(1 << k) for k in range(units)]


def loo(outcome: float, without: np.ndarray) -> np.ndarray:
    """d_k = R - Phi(answer without unit k): [K] float64 for `without` [K].

    Does not sum to R - Phi_0: if either of two units suffices, both get 0; if both are needed, each gets the full
    difference. Unbiased if units do not depend on each other. Otherwise biased, because the answer without unit k still
    contains later units that were sampled given unit k.
    """
    return outcome - np.asarray(without, dtype=np.float64)


def sample_orders(units: int, permutations: int, random: np.random.Generator) -> list[np.ndarray] | None:
    """Random orders [K] of units, in antithetic pairs (each second one reverses the one before) for lower variance.

    None if all 2^K coalitions cost no more than those of the orders, so that the values can be exact. Source of the
    pairs: Mitchell et al. 2022, "Sampling permutations for Shapley value estimation".
    """
    if units <= 1 or 2**units - 2 <= permutations * (units - 1):
        return None
    chosen: list[np.ndarray] = []
    while len(chosen) < permutations:
        order = random.permutation(units)
        chosen += [order, order[::-1]]
    return chosen[:permutations]


def coalitions(units: int, chosen: Sequence[np.ndarray] | None) -> list[int]:
    """The coalitions to evaluate, ascending, without the empty and the full one: the prefixes of the orders
    `chosen`.
    """
    if chosen is None:
        return list(range(1, full_coalition(units)))
    needed: set[int] = set()
    for order in chosen:
        joined = 0
        for unit in order.tolist()[:-1]:
            joined |= 1 << unit
            needed.add(joined)
    return sorted(needed)


def shapley(units: int, chosen: Sequence[np.ndarray] | None, values: Mapping[int, float]) -> np.ndarray:
    """phi_k = mean of Phi(S with k) - Phi(S) over the orders in which units join: [K] float64, sums to R - Phi_0.

    Biased, because a share of the outcome is not a return; unbiased only for additive worth and independent units.
    `chosen`: result of `sample_orders`, which estimates the values without bias. None computes them exactly: the sum
    over S without k of |S|! (K - |S| - 1)! / K! times the difference. `values`: coalition -> value, for the result of
    `coalitions`, the empty (0) and the full coalition.
    Source: Shapley 1953; for sampled orders Castro et al. 2009, "Polynomial calculation of the Shapley value".
    """
    credits = np.zeros(units)
    if chosen is None:
        weights = [factorial(s) * factorial(units - s - 1) / factorial(units) for s in range(units)]
        for members in range(1 << units):
            for unit in range(units):
                if not members >> unit & 1:
                    gain = values[members | 1 << unit] - values[members]
                    credits[unit] += weights[members.bit_count()] * gain
        return credits
    for order in chosen:
        joined = 0
        for unit in order.tolist():
            credits[unit] += values[joined | 1 << unit] - values[joined]
            joined |= 1 << unit
    return credits / len(chosen)
