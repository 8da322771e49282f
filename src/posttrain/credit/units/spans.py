"""Spans that partition the sampled tokens of an answer or an episode into units, and the token ids without some units."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from posttrain.episode import Stream


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


@dataclass(frozen=True)
class RenderingTokens:
    """Special token ids, to render an answer without some of its units. Nothing is decoded, so the kept tokens are those sampled."""

    end: int
    """The end token to append to an answer."""
    ends: Collection[int]
    """All tokens that end an answer."""
    blank: int
    """A space."""


def with_units(stream: Stream, units: Spans, kept: np.ndarray, tokens: RenderingTokens) -> np.ndarray:
    """`stream` with only the units that `kept` [K] bool marks: ids [T'] int64.

    Tokens that were not sampled and end tokens that close a turn are kept. The last unit determines the end: without
    it, a truncated answer gets an end token; with it, the answer stays truncated.
    """
    sampled = np.flatnonzero(stream.sampled)
    closes = np.append(np.diff(sampled) > 1, True) & np.isin(stream.ids[sampled], list(tokens.ends))
    left_out = sampled[~kept[units.unit_of_token] & ~closes]
    ids = np.delete(stream.ids, left_out)
    return ids if kept[-1:].all() or closes[-1] else np.append(ids, tokens.end)


def prefix_lengths(stream: Stream, units: Spans) -> np.ndarray:
    """[K] int64: length of the stream before unit 0, 1, ..., K - 1. The first is the length of the prompt. Tokens
    between two units belong to the later unit."""
    sampled = np.flatnonzero(stream.sampled)
    first = sampled[:1]
    return np.concatenate([first, sampled[units.cuts[1:-1] - 1] + 1])


def blanked_prefix(stream: Stream, start: int, stop: int, tokens: RenderingTokens) -> np.ndarray:
    """The published counterfactual of the unit of sampled tokens [start, stop): the tokens before it, one blank per
    token, and the end token. The tokens after it are removed as well."""
    place = int(np.flatnonzero(stream.sampled)[start])
    blanks = np.full(stop - start, tokens.blank)
    return np.concatenate([stream.ids[:place], blanks, [tokens.end]]).astype(np.int64)
