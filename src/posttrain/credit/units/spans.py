"""Spans that partition the sampled tokens of an answer or an episode into units."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, eq=False)
class Spans:
    """K units over n sampled tokens: unit k is the tokens from `cuts[k]` up to, not including, `cuts[k + 1]`.

    Sorted, disjoint and covering by construction: `ValueError` for cuts that do not increase from 0. Positions count
    sampled tokens only, in the order of sampling. In the published code, some tokens belong to no unit (those before
    the first label, the end token, the last token of a truncated answer) and get no credit. Here such tokens form
    separate spans with `is_unit` false, and the end token belongs to the last unit.
    """

    cuts: np.ndarray
    """[K + 1] int64: 0, the inner cuts, n; [0] without tokens."""
    is_unit: np.ndarray
    """[K] bool: whether the segmenter marked the span as a unit. False for thinking blocks, text before the first label
    or after the steps, and answers without steps. An episode without units gets the credit of its outcome."""

    def __post_init__(self) -> None:
        if len(self.cuts) == 0 or self.cuts[0] != 0 or (np.diff(self.cuts) <= 0).any():
            raise ValueError(f"cuts must increase strictly from 0, not {self.cuts}")
        if len(self.is_unit) != len(self):
            raise ValueError(f"{len(self.is_unit)} flags for {len(self)} units")

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of each unit."""
        return pairwise(self.cuts.tolist())

    @property
    def tokens(self) -> int:
        """n, the number of tokens covered."""
        return int(self.cuts[-1])

    @property
    def lengths(self) -> np.ndarray:
        """[K] int64: tokens of each unit, all at least 1."""
        return np.diff(self.cuts)

    @property
    def unit_of_token(self) -> np.ndarray:
        """[n] int64: the unit that each token belongs to."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @classmethod
    def from_cuts(cls, tokens: int, inner: np.ndarray, is_unit: bool = True) -> "Spans":
        """The units of `tokens` tokens, cut before each token in `inner`; cuts outside 1 .. tokens - 1 are ignored."""
        inside = np.unique(inner[(inner > 0) & (inner < tokens)])
        cuts = np.concatenate([[0], inside, [tokens] if tokens else []]).astype(np.int64)
        return cls(cuts, np.full(len(cuts) - 1, is_unit))

    @classmethod
    def concatenate(cls, parts: Sequence["Spans"]) -> "Spans":
        """The units of several answers, one after the other. No unit reaches from one answer into the next."""
        ends = np.cumsum([0, *(part.tokens for part in parts)])
        cuts = [part.cuts[1:] + end for part, end in zip(parts, ends[:-1], strict=True)]
        return cls(
            np.concatenate([np.zeros(1, dtype=np.int64), *cuts]),
            np.concatenate([np.zeros(0, dtype=bool), *(part.is_unit for part in parts)]),
        )
