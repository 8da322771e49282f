"""Sums that do not depend on order, shared by the baselines."""

import math
from collections.abc import Iterator

import numpy as np

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


def mean(values: np.ndarray) -> float:
    """Mean of [n] values, n > 0, the same bits in any order: `math.fsum` rounds once."""
    return math.fsum(values.tolist()) / len(values)


def alike(values: np.ndarray) -> bool:
    """Whether [n] values are all equal, or differ by no more than float32 rewards round (1e-6 of the larger)."""
    return len(values) == 0 or math.isclose(values.min(), values.max(), rel_tol=1e-6)


def centred(values: np.ndarray) -> np.ndarray:
    """[n] values minus their mean; exactly 0 where all are alike, so that a group without signal stays without."""
    if alike(values):
        return np.zeros(len(values))
    return values - mean(values)


def standardised(values: np.ndarray, correction: int) -> np.ndarray:
    """[n] values minus mean, over (standard deviation + 1e-6); exactly 0 where all are alike.

    `correction`: 1 divides the variance by n - 1 (sample), 0 by n (population).
    """
    deviations = centred(values)
    if not deviations.any():
        return deviations
    variance = math.fsum((deviations**2).tolist()) / (len(values) - correction)
    return deviations / (math.sqrt(variance) + EPSILON)


def members(groups: np.ndarray) -> Iterator[np.ndarray]:
    """For each distinct id in `groups` [N] int: the indices that carry it."""
    for group in np.unique(groups):
        yield np.flatnonzero(groups == group)
