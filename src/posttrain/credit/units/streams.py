"""Units of a token stream: its answers are found by its bookkeeping, and units are given as places in the stream."""

from collections.abc import Collection

import numpy as np

from posttrain.credit.units.offsets import Decode
from posttrain.credit.units.segment import Answer, opened, segment
from posttrain.recipe.units import UnitsRecipe
from posttrain.rollout.streams import Stream


def answers_in(
    stream: Stream, end_tokens: Collection[int], decode: Decode, entropies: np.ndarray | None = None
) -> list[Answer]:
    """The answers of a stream, in order: each run of sampled tokens of one turn.

    An answer has ended if its last token is one of `end_tokens`. `entropies` [n] float, nats: one per sampled token.
    """
    places = np.flatnonzero(stream.sampled)
    apart = (np.diff(places) > 1) | (np.diff(stream.turn[places]) != 0)
    cuts = np.flatnonzero(apart) + 1
    shares = [None] * (len(cuts) + 1) if entropies is None else np.split(entropies, cuts)
    return [
        Answer(
            ids=stream.ids[run],
            ended=int(stream.ids[run[-1]]) in end_tokens,
            opened=opened(stream.ids[: run[0]], decode),
            entropies=share,
        )
        for run, share in zip(np.split(places, cuts), shares, strict=True)
    ]


def unit_ends(
    recipe: UnitsRecipe,
    stream: Stream,
    end_tokens: Collection[int],
    decode: Decode,
    entropies: np.ndarray | None = None,
) -> np.ndarray:
    """[K] int64, rising: the place in the stream of the last token of each unit, all answers together.

    The last one is the last sampled token, so a reward read there is that of the whole. Arguments as in `answers_in`;
    `ValueError` where `entropy` units lack entropies.
    """
    found = segment(recipe, answers_in(stream, end_tokens, decode, entropies), decode)
    return np.flatnonzero(stream.sampled)[found.cuts[1:] - 1]
