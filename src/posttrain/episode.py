"""The data that rollouts produce: streams of tokens, turns, episodes, and credit per token."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from posttrain.errors import require_type


class StopReason(StrEnum):
    """Why an answer ended."""

    END_TOKEN = "end_token"
    """The policy sampled one of the model's end tokens."""
    STOP_STRING = "stop_string"
    """The answer contains a stop string."""
    TURN_BUDGET = "turn_budget"
    """The answer reached `rollout.tokens_per_turn`."""
    EPISODE_BUDGET = "episode_budget"
    """The episode reached `rollout.tokens_per_episode`."""

    @property
    def words(self) -> str:
        """The reason as pages show it: `truncated at`, and the limit, for the two limits on tokens."""
        limits = {"turn_budget": "rollout.tokens_per_turn", "episode_budget": "rollout.tokens_per_episode"}
        return f"truncated at {limits[self.value]}" if self.value in limits else self.value


CUT_OFF = (StopReason.TURN_BUDGET, StopReason.EPISODE_BUDGET)
"""Stop reasons of answers that a token budget truncated."""


class Outcome(StrEnum):
    """How an episode ended."""

    TERMINATED = "terminated"
    """It reached an end of the task."""
    TRUNCATED = "truncated"
    """A limit on turns or tokens ended it."""
    UNSCORED = "unscored"
    """It ended, but no reward applies to it. It is left out of updates and of means, and counted."""
    FAILED = "failed"
    """The environment or a reward failed; see `Episode.failure`."""


@dataclass
class Stream:
    """An append-only sequence of T tokens with per-token data."""

    ids: np.ndarray
    """[T] int64: token ids."""
    sampled: np.ndarray
    """[T] bool: whether the policy sampled this token. Only sampled tokens carry loss."""
    rollout_logprobs: np.ndarray
    """[T] float32: log-probability in nats under the policy that sampled the token; 0 if not sampled."""
    rewards: np.ndarray
    """[T] float32: reward received at this token. Turn rewards are placed on the last sampled token of their turn."""
    turn: np.ndarray
    """[T] int32: index of the turn that sampled the token; -1 if not sampled."""
    versions: np.ndarray
    """[T] int32: version (number of optimizer updates) of the weights that sampled the token; -1 for tokens that no policy
    of the run sampled."""
    experts: np.ndarray | None = None
    """[T, R, k]: the experts that a model with R routers used for each token when it sampled (`model.router_replay`); -1 for
    tokens that it did not compute. None: unknown."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class Turn:
    """One observation and the policy's answer to it."""

    stream: int
    """Index of the stream that contains the answer."""
    start: int
    """Position of the first sampled token in that stream."""
    stop: int
    """Position after the last sampled token."""
    reward: float
    stop_reason: StopReason
    answer: str
    """The answer as text, for display. Training uses the ids."""
    info: dict[str, Any] = field(default_factory=dict)
    state: str | None = None
    """The environment's name of the state in which the answer was given; None if the environment does not name
    states."""


@dataclass
class Episode:
    """The turns of one task attempt."""

    seed: int
    """The environment seed (the task)."""
    group: int
    """Explicit id of the group, unique within a step."""
    index: int
    """Position within the group."""
    version: int
    """Version (number of optimizer updates) of the weights at its start. Newer weights may have sampled later tokens, see
    `Stream.versions`."""
    streams: list[Stream]
    turns: list[Turn]
    outcome: Outcome
    failure: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    """The conversation as text, for display."""
    info: dict[str, Any] = field(default_factory=dict)
    """Facts about the episode: how its agent ended, and counts of its calls. Empty without an agent."""

    @property
    def total_reward(self) -> float:
        """The undiscounted return: the sum of the turns' rewards."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def has_return(self) -> bool:
        """Whether `total_reward` is a return: the episode did not fail, and a reward applies to it."""
        return self.outcome in (Outcome.TERMINATED, Outcome.TRUNCATED)

    @property
    def success(self) -> bool:
        """Whether the last turn reported success. Always false for a failed episode."""
        return bool(self.turns) and self.has_return and bool(self.turns[-1].info.get("success", False))

    @property
    def scores(self) -> dict[str, float]:
        """The scores that the environment reports and that apply to the task, by name."""
        reported = self.turns[-1].info.get("scores", {}) if self.turns else {}
        return {name: score for name, score in reported.items() if score is not None}

    @property
    def sampled_tokens(self) -> int:
        return int(sum(stream.sampled.sum() for stream in self.streams))

    @property
    def versions(self) -> np.ndarray:
        """[n] int32: the version that sampled each sampled token, in order, across streams."""
        parts = [stream.versions[stream.sampled] for stream in self.streams]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


def require_episodes(episodes: Sequence[Episode]) -> None:
    """InputError unless `episodes` is a sequence of episodes."""
    require_type("episodes", episodes, Sequence)
    for episode in episodes:
        require_type("episodes", episode, Episode)


def score_names(episodes: Sequence[Episode]) -> list[str]:
    """The names of the scores that the episodes report. None if all that they report is their return, as `score`."""
    names = list(dict.fromkeys(name for episode in episodes for name in episode.scores))
    return [] if all(e.scores in ({}, {"score": e.total_reward}) for e in episodes) else names


def reports_success(episodes: Sequence[Episode]) -> bool:
    """Whether the environment reports success in any episode; True if no episode has a return."""
    ended = [episode for episode in episodes if episode.has_return and episode.turns]
    return not ended or any("success" in episode.turns[-1].info for episode in ended)


PerToken = list[list[np.ndarray]]
"""`[episode][stream]` -> [T] float32, aligned with `Stream.ids`; zero for tokens that were not sampled."""


@dataclass(frozen=True)
class RewardStreams:
    """Causal credit: rewards per token. They become advantages through the return."""

    values: PerToken


@dataclass(frozen=True)
class Advantages:
    """Hindsight credit: one advantage per token, used by the loss as is."""

    values: PerToken
    without_baseline: frozenset[int] = frozenset()
    """Positions of the episodes whose credit needs another episode to compare with and has none, such as a group of one.
    They are left out of the update and its divisor. An episode whose credit is 0 after a comparison stays in both."""
