"""Token ids of an answer without some of its units. Nothing is decoded, so the kept tokens are those sampled."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from posttrain.credit.units.spans import Spans
from posttrain.episode import Stream


@dataclass(frozen=True)
class RenderingTokens:
    """Special token ids."""

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
