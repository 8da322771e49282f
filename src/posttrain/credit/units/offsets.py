"""Align the text of an answer with its tokens, by decoding a few token ids at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text, as a tokenizer's `decode` with `clean_up_tokenization_spaces=False`: special tokens are included, and
invalid UTF-8 bytes are U+FFFD."""

_BROKEN = "\ufffd"
_LONGEST = 4
"""Bytes of the longest UTF-8 character: the maximum number of tokens that can share one character."""


@dataclass(frozen=True, eq=False)
class AlignedText:
    """The text of n tokens and the position of each token in it."""

    text: str
    offsets: np.ndarray
    """[n + 1] int64, non-decreasing: token t adds the characters from `offsets[t]` to `offsets[t + 1]`. A character that
    several tokens share belongs to the last of them."""
    whole: np.ndarray
    """[n + 1] bool: whether a cut before token t splits no character, so that the tokens on each side decode to the text on
    that side."""

    def slice(self, start: int, stop: int) -> str:
        """The text of the tokens from `start` to `stop`."""
        return self.text[self.offsets[start] : self.offsets[stop]]

    def cuts(self, places: Sequence[tuple[int, int]]) -> np.ndarray:
        """[m] int64: the tokens before which to cut the text at `places`, each a range (first, last) of characters.

        The cut is the first one within the range (both ends included) that splits no token and no character. If there is
        none, the cut is before the token that contains the character `last`, which the unit must include.
        """
        edges = np.flatnonzero(self.whole)
        at = self.offsets[edges]
        first, last = np.array(places, dtype=np.int64).reshape(-1, 2).T
        inside = np.searchsorted(at, first, side="left").clip(max=len(at) - 1)
        holding = (np.searchsorted(at, last, side="right") - 1).clip(min=0)
        return edges[np.where((at[inside] >= first) & (at[inside] <= last), inside, holding)]

    def between_characters(self, cuts: np.ndarray) -> np.ndarray:
        """[m] int64: `cuts`, with cuts inside a character moved to its start."""
        edges = np.flatnonzero(self.whole)
        return edges[np.searchsorted(edges, cuts, side="right") - 1]


def align(ids: Sequence[int], decode: Decode) -> AlignedText:
    """The text of `ids` [n] with exact offsets.

    Tokens are decoded one by one, and together only if they share a character, so the work is linear in n; decoding every
    prefix would be quadratic. The published code decodes each token alone, which fails for characters that span several
    tokens. It also drops blank lines before it counts, and treats token id 0 as padding. Here the text is that of `decode`.
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

    A cut is suspect if the text before it ends in U+FFFD. It splits a character if the tokens on both sides decode to
    another text together than separately.
    """
    single = cache(lambda token: decode([token]))
    whole = np.ones(len(tokens) + 1, dtype=bool)
    start = 0
    for place in range(1, len(tokens)):
        text = single(tokens[place - 1])
        if not text or text.endswith(_BROKEN):
            first = max(start, place - _LONGEST)
            left = decode(tokens[first:place])
            # Some decoders return one U+FFFD per byte until a character is complete, so one more token may not be enough.
            stops = range(place + 1, min(place + _LONGEST, len(tokens)) + 1) if left.endswith(_BROKEN) else ()
            if any(decode(tokens[first:stop]) != left + decode(tokens[place:stop]) for stop in stops):
                whole[place] = False
                continue
        start = place
    return whole


def _reader(tokens: list[int], decode: Decode) -> Callable[[tuple[int, ...]], str]:
    """A function that decodes tokens as inside a text. SentencePiece decoders drop the space at the start of a text."""
    anchor = next((token for token in tokens if (text := decode([token])).strip() and _BROKEN not in text), None)
    if anchor is None:
        return lambda piece: decode(piece)
    before = decode([anchor])

    @cache
    def read(piece: tuple[int, ...]) -> str:
        text = decode([anchor, *piece])
        return text[len(before) :] if text.startswith(before) else decode(piece)

    return read
