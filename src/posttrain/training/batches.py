"""Packing: streams to micro-batches of at most `tokens_per_batch` tokens, each stream whole and in one of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.errors import RunError
from posttrain.models.packing import prompt_length
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


def pack(samples: Sequence[Sample], budget: int) -> list[list[int]]:
    """Indices of samples, in groups that each take at most `budget` tokens in a row.

    Samples with the same prompt stand together, since the prompt is computed once for all of them; as many of them as
    the budget allows. Such bundles are then packed first-fit decreasing: the longest first, each into the first group
    with room, which needs at most 11/9 of the fewest groups, plus one (Johnson 1973). A stream that is longer than
    the budget raises RunError with its name.
    """
    bundles: list[tuple[int, list[int]]] = []
    for indices in _by_prompt(samples).values():
        prompt = prompt_length(samples[indices[0]].stream.sampled)
        longest_first = sorted(indices, key=lambda i: (-len(samples[i].stream), i))
        for index in longest_first:
            length = len(samples[index].stream)
            if length > budget:
                raise RunError(
                    f"{samples[index].label} has {length} tokens, more than learner.tokens_per_batch = {budget}; raise "
                    "it, or lower rollout.tokens_per_episode"
                )
            if index != longest_first[0] and bundles[-1][0] + length - prompt <= budget:
                bundles[-1] = (bundles[-1][0] + length - prompt, [*bundles[-1][1], index])
            else:
                bundles.append((length, [index]))
    groups: list[list[int]] = []
    room: list[int] = []
    for size, indices in sorted(bundles, key=lambda bundle: (-bundle[0], bundle[1])):
        place = next((g for g, free in enumerate(room) if free >= size), None)
        if place is None:
            groups.append([])
            room.append(budget)
            place = len(groups) - 1
        groups[place] += indices
        room[place] -= size
    return groups


def _by_prompt(samples: Sequence[Sample]) -> dict[bytes, list[int]]:
    found: dict[bytes, list[int]] = {}
    for index, sample in enumerate(samples):
        prompt = sample.stream.ids[: prompt_length(sample.stream.sampled)]
        found.setdefault(prompt.tobytes(), []).append(index)
    return found
