"""Packing: streams to micro-batches of at most `tokens_per_batch` tokens, each stream whole and in one of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.errors import RunError
from posttrain.rollout.streams import Stream


@dataclass
class Sample:
    """One stream as the learner sees it, with n sampled tokens among its T."""

    stream: Stream
    label: str
    """Names the episode in messages."""
    advantages: np.ndarray
    """[n] float32: credit of each sampled token."""
    reference: np.ndarray | None = None
    """[n] float32: log-probabilities under the reference model."""
    old: np.ndarray | None = None
    """[n] float32: the learner's own log-probabilities before the step's updates; None takes the engine's."""

    @property
    def sampled_tokens(self) -> int:
        return int(self.stream.sampled.sum())


def pack(lengths: Sequence[int], budget: int, names: Sequence[str]) -> list[list[int]]:
    """Indices of streams, grouped so that no group has more than `budget` tokens.

    First-fit decreasing: longest first, each into the first group with room. Needs at most 11/9 of the fewest possible
    groups plus one (Johnson 1973). A stream longer than the budget raises RunError with its name.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > budget:
            raise RunError(
                f"{names[index]} has {length} tokens, more than learner.tokens_per_batch = {budget}; raise it, "
                "or lower rollout.tokens_per_episode"
            )
        place = next((g for g, free in enumerate(room) if free >= length), None)
        if place is None:
            groups.append([])
            room.append(budget)
            place = len(groups) - 1
        groups[place].append(index)
        room[place] -= length
    return groups
