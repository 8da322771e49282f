"""Where the characters of an answer stand among its tokens, found by decoding token ids a few at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text, as a tokenizer's `decode` does: nothing tidied (`clean_up_tokenization_spaces=False`), special
tokens shown, bytes that are no UTF-8 as U+FFFD."""

_BROKEN = "\ufffd"
_LONGEST = 4
"""Bytes of the longest UTF-8 character, so no more tokens than these can share one."""


@dataclass(frozen=True, eq=False)
class AlignedText:
    """The text of n tokens and the place of each token in it."""

    text: str
    offsets: np.ndarray
    """[n + 1] int64, never falling: token t adds the characters from `offsets[t]` to `offsets[t + 1]`. A character that
    several tokens share stands with the last of them."""
    whole: np.ndarray
    """[n + 1] bool: a cut before token t divides no character, so that the tokens on each side decode to the text on
    each side."""

    def slice(self, start: int, stop: int) -> str:
        """The text of the tokens from `start` to `stop`."""
        return self.text[self.offsets[start] : self.offsets[stop]]

    def cuts(self, places: Sequence[tuple[int, int]]) -> np.ndarray:
        """[m] int64: the tokens before which to cut the text at `places`, each a range (first, last) of characters.

        The cut is the first one within the range (both ends included) that divides no token and no character; where
        there is none, it stands before the token that holds the character `last`, which a unit must not lose.
        """
        edges = np.flatnonzero(self.whole)
        at = self.offsets[edges]
        first, last = np.array(places, dtype=np.int64).reshape(-1, 2).T
        inside = np.searchsorted(at, first, side="left").clip(max=len(at) - 1)
        holding = (np.searchsorted(at, last, side="right") - 1).clip(min=0)
        return edges[np.where((at[inside] >= first) & (at[inside] <= last), inside, holding)]

    def between_characters(self, cuts: np.ndarray) -> np.ndarray:
        """[m] int64: `cuts` with those that divide a character moved to before it."""
        edges = np.flatnonzero(self.whole)
        return edges[np.searchsorted(edges, cuts, side="right") - 1]


def align(ids: Sequence[int], decode: Decode) -> AlignedText:
    """The text of `ids` [n] with true offsets.

    Tokens are decoded alone, and together only where they share a character, so the work is linear in n; decoding
    every prefix, which is the straightforward way, is quadratic. The published code maps characters by decoding each
    token alone, which breaks where a character is spread over tokens, drops blank lines before it counts, and takes
    token id 0 for padding; here ids are never interpreted and the text is what `decode` says.
    """
    tokens = [int(token) for token in ids]
    whole = _whole(tokens, decode)
    read = _reader(tokens, decode)
    edges = np.flatnonzero(whole).tolist()
    offsets = np.zeros(len(tokens) + 1, dtype=np.int64)
    pieces = []
    for start, stop in pairwise(edges):
        pieces.append(read(tuple(tokens[start:stop])) if start else decode(tokens[:stop]))
        offsets[start + 1 : stop] = offsets[start]
        offsets[stop] = offsets[start] + len(pieces[-1])
    return AlignedText("".join(pieces), offsets, whole)


def _whole(tokens: list[int], decode: Decode) -> np.ndarray:
    """[n + 1] bool: see `AlignedText.whole`.

    A cut is suspect where the text so far ends in U+FFFD. It divides a character if the tokens on its two sides
    decode to something else together than apart.
    """
    alone = cache(lambda token: decode([token]))
    whole = np.ones(len(tokens) + 1, dtype=bool)
    start = 0
    for place in range(1, len(tokens)):
        text = alone(tokens[place - 1])
        if (not text or text.endswith(_BROKEN)) and _divides(tokens, max(start, place - _LONGEST), place, decode):
            whole[place] = False
        else:
            start = place
    return whole


def _divides(tokens: list[int], start: int, place: int, decode: Decode) -> bool:
    left = decode(tokens[start:place])
    # Some decoders give one U+FFFD per byte until a character is complete, so a look at one more token may not do.
    return left.endswith(_BROKEN) and any(
        decode(tokens[start:stop]) != left + decode(tokens[place:stop])
        for stop in range(place + 1, min(place + _LONGEST, len(tokens)) + 1)
    )


def _reader(tokens: list[int], decode: Decode) -> Callable[[tuple[int, ...]], str]:
    """What reads tokens as they read inside a text: decoders of the SentencePiece kind drop the space at its start."""
    anchor = next((token for token in tokens if (text := decode([token])).strip() and _BROKEN not in text), None)
    if anchor is None:
        return lambda piece: decode(piece)
    before = decode([anchor])

    @cache
    def read(piece: tuple[int, ...]) -> str:
        text = decode([anchor, *piece])
        return text[len(before) :] if text.startswith(before) else decode(piece)

    return read
