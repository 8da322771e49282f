"""Samples, and their packing into micro-batches of at most `tokens_per_batch` tokens. A stream is never divided."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.episode import Episode, Stream
from posttrain.errors import RunError
from posttrain.models.packing import prompt_length


@dataclass(frozen=True)
class PreferenceSide:
    """Which answer of which row of preference data a stream is."""

    row: int
    """Unique within an update; the two answers of a pair share it and stay in one forward pass."""
    chosen: bool
    margin: float = 0.0
    """How much better the chosen answer of a pair is, in units of reward."""


@dataclass(frozen=True)
class TeacherScores:
    """What a teacher says about n sampled tokens, in nats."""

    logprobs: np.ndarray
    """[n] float32: log-probability of each."""
    candidates: np.ndarray | None = None
    """[n, k] int32: its most probable tokens at each position, the most probable first. None: not computed, or all tokens."""
    distribution: np.ndarray | None = None
    """[n, k + 1] float32: log-probabilities of the candidates and, last, of all other tokens together; [n, V] where
    `candidates` is None. None: not computed."""


@dataclass
class Sample:
    """One stream as the learner sees it, with n sampled tokens among its T."""

    stream: Stream
    label: str
    """Names the episode in messages."""
    advantages: np.ndarray
    """[n] float32: credit of each sampled token."""
    ref_logprobs: np.ndarray | None = None
    """[n] float32: log-probabilities under the reference model."""
    old_logprobs: np.ndarray | None = None
    """[n] float32: the learner's own log-probabilities before the step's updates; None takes the engine's."""
    values: np.ndarray | None = None
    """[n] float32: the critic's values before the step's updates, in units of reward."""
    returns: np.ndarray | None = None
    """[n] float32: targets of the critic's values."""
    teacher: TeacherScores | None = None
    """The teacher's scores of the sampled tokens."""
    ptx: bool = False
    """A supervised row in reinforcement learning or distillation, not an episode."""
    side: PreferenceSide | None = None
    """Set for preference data alone."""

    @property
    def sampled_tokens(self) -> int:
        return int(self.stream.sampled.sum())


def samples_of_episodes(episodes: Sequence[Episode], step: int) -> list[Sample]:
    """One sample per stream, in the order of episodes and their streams, with advantages of 0."""
    return [
        Sample(
            stream=stream,
            label=f"step {step} group {episode.group} episode {episode.index} (environment seed {episode.seed})",
            advantages=np.zeros(int(stream.sampled.sum()), dtype=np.float32),
        )
        for episode in episodes
        for stream in episode.streams
    ]


def on_stream(values: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    """[T] float32: `values` [n] at the sampled tokens of a stream with mask `sampled` [T] bool, 0 elsewhere."""
    full = np.zeros(len(sampled), dtype=np.float32)
    full[sampled] = values
    return full


def pack(samples: Sequence[Sample], budget: int, key: str = "learner.tokens_per_batch") -> list[list[int]]:
    """Indices of samples, in groups of at most `budget` tokens each.

    Samples with the same prompt go together as far as the budget allows, since their prompt is computed once. The two
    answers of a preference pair are never divided. These bundles are packed first-fit decreasing: the longest first, each
    into the first group with room. That needs at most 11/9 of the fewest possible groups, plus one (Johnson 1973).

    Raises:
        RunError: a sample is longer than the budget; the message names the sample and the budget's `key`.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for size, indices in sorted(_bundles(samples, budget), key=lambda bundle: (-bundle[0], bundle[1])):
        if size > budget:
            raise RunError(
                f"{samples[indices[0]].label} has {size} tokens, more than {key} = {budget}; raise "
                "it, or lower the most tokens that an episode or row may have"
            )
        place = next((g for g, free in enumerate(room) if free >= size), None)
        if place is None:
            groups.append([])
            room.append(budget)
            place = len(groups) - 1
        groups[place] += indices
        room[place] -= size
    return groups


def _bundles(samples: Sequence[Sample], budget: int) -> list[tuple[int, list[int]]]:
    """(tokens, indices) of samples that belong together."""
    bundles: list[tuple[int, list[int]]] = []
    for indices in _by_row([i for i, sample in enumerate(samples) if sample.side is not None], samples).values():
        prompts = {_prompt(samples[i]): len(_prompt(samples[i])) // _ID_BYTES for i in indices}
        answers = sum(len(samples[i].stream) - prompts[_prompt(samples[i])] for i in indices)
        bundles.append((sum(prompts.values()) + answers, indices))
    for indices in _by_prompt([i for i, sample in enumerate(samples) if sample.side is None], samples).values():
        prompt = prompt_length(samples[indices[0]].stream.sampled)
        longest_first = sorted(indices, key=lambda i: (-len(samples[i].stream), i))
        for index in longest_first:
            length = len(samples[index].stream)
            if index != longest_first[0] and bundles[-1][0] + length - prompt <= budget:
                bundles[-1] = (bundles[-1][0] + length - prompt, [*bundles[-1][1], index])
            else:
                bundles.append((length, [index]))
    return bundles


_ID_BYTES = np.dtype(np.int64).itemsize


def _prompt(sample: Sample) -> bytes:
    return sample.stream.ids[: prompt_length(sample.stream.sampled)].tobytes()


def _by_prompt(indices: Sequence[int], samples: Sequence[Sample]) -> dict[bytes, list[int]]:
    groups: dict[bytes, list[int]] = {}
    for index in indices:
        groups.setdefault(_prompt(samples[index]), []).append(index)
    return groups


def _by_row(indices: Sequence[int], samples: Sequence[Sample]) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for index in indices:
        side = samples[index].side
        assert side is not None
        rows.setdefault(side.row, []).append(index)
    return rows
