"""An answer without some of its units, as token ids: nothing is decoded, so what stays is what was sampled."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np

from posttrain.credit.units.spans import Spans
from posttrain.episode import Stream

Rendering = Literal["delete", "placeholder", "blank"]


@dataclass(frozen=True)
class RenderingTokens:
    """The token ids that renderings need."""

    end: int
    """Ends an answer."""
    ends: Collection[int]
    """All tokens that end one."""
    placeholder: list[int]
    """`[omitted]`."""
    blank: int
    """A space."""


def render_coalition(stream: Stream, units: Spans, members: int, how: Rendering, tokens: RenderingTokens) -> np.ndarray:
    """`stream` with the units alone whose bit is set in `members`: ids [T'] int64.

    What nobody sampled stays, and so do end tokens that close a turn. The last unit carries the ending: without it an
    answer that was cut off gets the end token; with it, it has none.
    """
    sampled = np.flatnonzero(stream.sampled)
    closes = np.append(np.diff(sampled) > 1, True) & np.isin(stream.ids[sampled], list(tokens.ends))
    kept = np.ones(len(stream), dtype=bool)
    fill: dict[int, list[int]] = {}
    for unit, (start, stop) in enumerate(units):
        if not members >> unit & 1:
            body = sampled[start:stop][~closes[start:stop]]
            kept[body] = False
            if how == "blank":
                fill |= {key: [tokens.blank] for key in body.tolist()}
            elif how == "placeholder" and len(body):
                fill[int(body[0])] = tokens.placeholder
    ids = [
        token
        for place, own in enumerate(stream.ids.tolist())
        for token in ([own] if kept[place] else fill.get(place, []))
    ]
    last_is_out = len(units) > 0 and not members >> (len(units) - 1) & 1
    if last_is_out and not closes[-1]:
        ids.append(tokens.end)
    return np.array(ids, dtype=np.int64)


def prefix_lengths(stream: Stream, units: Spans) -> np.ndarray:
    """[K] int64: tokens of the stream before unit 0, 1, ..., K - 1, what stands between a unit and the next counted to
    the next; the first of them is the prompt."""
    sampled = np.flatnonzero(stream.sampled)
    first = sampled[:1]
    return np.concatenate([first, sampled[units.cuts[1:-1] - 1] + 1])


def blanked_prefix(stream: Stream, start: int, stop: int, tokens: RenderingTokens) -> np.ndarray:
    """The published counterfactual of a unit of sampled tokens [start, stop): what stood before it, as many blanks as it
    has tokens, and the end token. What came after it is gone as well."""
    place = int(np.flatnonzero(stream.sampled)[start])
    blanks = np.full(stop - start, tokens.blank)
    return np.concatenate([stream.ids[:place], blanks, [tokens.end]]).astype(np.int64)
