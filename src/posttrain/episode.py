"""What a rollout produces: streams of tokens, turns, episodes."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np


class StopReason(StrEnum):
    """Why the policy's answer of a turn ended."""

    END_TOKEN = "end_token"
    """The policy sampled one of the model's end tokens."""
    STOP_STRING = "stop_string"
    """The answer came to hold one of the stop strings."""
    TURN_BUDGET = "turn_budget"
    """The answer reached the most tokens of a turn."""
    EPISODE_BUDGET = "episode_budget"
    """The episode reached the most tokens of its context."""


CUT_OFF = (StopReason.TURN_BUDGET, StopReason.EPISODE_BUDGET)
"""The policy was not done: its answer has no end."""


class Outcome(StrEnum):
    """How an episode ended."""

    TERMINATED = "terminated"
    """By the task's own rules."""
    TRUNCATED = "truncated"
    """By a limit on turns or tokens."""
    FAILED = "failed"
    """The environment or a reward failed; `Episode.failure` says how."""


@dataclass
class Stream:
    """An append-only token sequence and what is known of each of its T tokens."""

    ids: np.ndarray
    """[T] int64: token ids."""
    sampled: np.ndarray
    """[T] bool: the policy sampled this token; only such tokens carry loss."""
    rollout_logprobs: np.ndarray
    """[T] float32: behaviour log-probability in nats where sampled, 0 elsewhere."""
    rewards: np.ndarray
    """[T] float32: reward that arrived at this token; turn rewards sit on the last sampled token of their turn."""
    turn: np.ndarray
    """[T] int32: index of the turn that sampled the token; -1 for tokens that nobody sampled."""
    versions: np.ndarray
    """[T] int32: version of the policy's weights that sampled the token, which is the number of optimizer updates they had
    seen; -1 for tokens that no policy of the run sampled."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class Turn:
    """One observation and the policy's answer to it."""

    stream: int
    """Index of the stream that holds the answer."""
    start: int
    """Position of the first sampled token in that stream."""
    stop: int
    """Position after the last sampled token."""
    reward: float
    stop_reason: StopReason
    answer: str
    """The answer as text, for people; training uses the ids."""
    info: dict[str, Any] = field(default_factory=dict)
    state: str | None = None
    """The environment's name for the state in which the answer was given; None where it names none."""


@dataclass
class Episode:
    """The turns of one task attempt."""

    seed: int
    """The environment seed (the task)."""
    group: int
    """Explicit id of the group, unique within a step."""
    index: int
    """Place within the group."""
    version: int
    """Version of the policy's weights at its beginning: the number of optimizer updates so far. Newer weights may have
    sampled its later tokens, see `Stream.versions`."""
    streams: list[Stream]
    turns: list[Turn]
    outcome: Outcome
    failure: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    """The conversation as text, for people."""

    @property
    def total_reward(self) -> float:
        """The undiscounted return as the environment paid it."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def success(self) -> bool:
        """Whether the last turn reported success; a failed episode never does."""
        return (
            bool(self.turns) and self.outcome is not Outcome.FAILED and bool(self.turns[-1].info.get("success", False))
        )

    @property
    def sampled_tokens(self) -> int:
        return int(sum(stream.sampled.sum() for stream in self.streams))

    @property
    def versions(self) -> np.ndarray:
        """[n] int32: the version that sampled each of its sampled tokens, in their order."""
        own = [stream.versions[stream.sampled] for stream in self.streams]
        return np.concatenate(own) if own else np.empty(0, dtype=np.int32)


PerToken = list[list[np.ndarray]]
"""`[episode][stream]` -> [T] float32, aligned with `Stream.ids`; zero where nothing was sampled."""


@dataclass(frozen=True)
class RewardStreams:
    """Causal credit: rewards per token, which go through the return before they reach the loss."""

    values: PerToken


@dataclass(frozen=True)
class Advantages:
    """Hindsight credit: used by the loss as it is."""

    values: PerToken
