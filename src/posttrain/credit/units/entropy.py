"""Segments by the entropy of a reference model: a unit begins where the next token was hard to predict."""

from typing import Literal

import numpy as np


def entropy_cuts(
    entropies: np.ndarray, threshold: float, peak: Literal["threshold", "local_max"] = "threshold"
) -> np.ndarray:
    """[m] int64: the tokens that begin a unit, the first token aside (Yin et al. 2025, arXiv 2501.02790).

    `entropies` [n] float, in nats: of the distribution that each token was drawn from, under the frozen reference
    model, full vocabulary, temperature 1. `threshold`: token t begins a unit iff entropies[t] > threshold. `local_max`:
    and if it is also above its neighbours; of equal neighbours that stand above the others, the first.

    The authors' segmentation is called `peak` and is the plain threshold. A threshold no entropy reaches (their 1000)
    gives one unit, 0 nearly one per token. A later variant takes the entropies of the policy in training, so that units
    move while they are learned from; the caller passes those of the reference. `ValueError` for entropies that are not
    finite.
    """
    values = np.asarray(entropies, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError("the reference model's entropies are not all finite")
    high = values > threshold
    if peak == "local_max":
        high &= _peaks(values)
    return np.flatnonzero(high[1:]) + 1


def _peaks(values: np.ndarray) -> np.ndarray:
    """[n] bool: the first token of each run of equal values that lie above what stands on both sides of the run."""
    heads = np.flatnonzero(np.diff(values, prepend=np.nan) != 0)  # NaN differs from everything
    runs = np.concatenate([[-np.inf], values[heads], [-np.inf]])
    found = np.zeros(len(values), dtype=bool)
    found[heads] = (runs[1:-1] > runs[:-2]) & (runs[1:-1] > runs[2:])
    return found
