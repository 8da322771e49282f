"""The episode driver: the policy answers, the environment steps, until the episode ends."""

import asyncio
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from posttrain.data.rendering import Renderer
from posttrain.distributed.world import current
from posttrain.engines.openai import ChatRequestError
from posttrain.engines.protocol import Engine, Request
from posttrain.environments.protocol import Environment, Message, open_environment
from posttrain.episode import Episode, Outcome
from posttrain.errors import InputError, WorkersLost
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.recipe.rollout import RolloutRecipe, SamplingRecipe
from posttrain.rollout.transcript import TokenTranscript, Transcript
from posttrain.seeds import derive_seed

T = TypeVar("T")
TranscriptT = TypeVar("TranscriptT", bound=Transcript)


@dataclass(frozen=True)
class EpisodeRequest:
    """One episode to play: its task, its group, and the name of its random numbers."""

    seed: int
    """Environment seed, which selects the task."""
    group: int
    """Group id, unique within a step."""
    index: int
    """Position within the group."""
    rng_key: tuple[int | str, ...]
    """Prefix of the seed names of this episode, for example (run seed, "sampling", step, group, index)."""

    def request_seed(self, attempt: int, turn: int) -> int:
        """The sampling seed of one turn. `attempt` and `turn` count from 0."""
        return derive_seed(*self.rng_key, attempt, turn)


class EpisodeSharding(Enum):
    """How several processes divide the episodes that all of them request."""

    NONE = "none"
    """Every process plays all of its own episodes."""
    BY_GROUP = "by_group"
    """Each process plays whole groups, and all processes receive all episodes."""
    RANK0 = "rank0"
    """Rank 0 plays all episodes, and all processes receive them."""


class EnvironmentFailure(Exception):
    """An environment raised an exception, timed out, or returned a reward that is not finite."""


class Scorer(Protocol):
    """Adds rewards to finished episodes, for example those of a reward model."""

    def __call__(self, episodes: Sequence[Episode]) -> None:
        """Add a reward to the last turn, and to that turn's stream, of each episode that did not fail."""
        ...


class EpisodeWorker(ABC, Generic[TranscriptT]):
    """Plays episodes: `run_episode` drives the environment, and a subclass supplies the answers."""

    environment: EnvironmentRecipe
    rollout: RolloutRecipe
    sampling: SamplingRecipe
    version: int
    """Version of the policy's weights."""
    scorer: Scorer | None
    sharding: EpisodeSharding = EpisodeSharding.NONE

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Number of episodes to keep in flight."""

    @abstractmethod
    def begin(self, messages: Sequence[Message], primer: str, state: str | None) -> TranscriptT:
        """A new transcript that opens with `messages`. Every answer starts with the text `primer`."""

    @abstractmethod
    async def answer(self, transcript: TranscriptT, request: EpisodeRequest, attempt: int) -> str | None:
        """Generate the next answer and append it to `transcript` as a turn.

        Returns its text, or None if the token budget leaves no room for one. Raises ChatRequestError if a remote model
        does not answer.
        """

    async def run_episode(self, request: EpisodeRequest) -> Episode:
        """Play one episode, and retry failed attempts as `rollout.failures` allows.

        A failure of the environment or of a remote model fails this episode only.
        """
        failures = self.rollout.failures
        attempts = failures.retries + 1 if failures.action == "retry" else 1
        for attempt in range(attempts):
            episode = await self._run_attempt(request, attempt)
            if episode.outcome is not Outcome.FAILED:
                break
        return episode

    async def _run_attempt(self, request: EpisodeRequest, attempt: int) -> Episode:
        environment = open_environment(self.environment)
        transcript: TranscriptT | None = None
        outcome, failure = Outcome.FAILED, None
        try:
            observation = await self._call(environment, partial(environment.reset, request.seed))
            transcript = self.begin(observation.messages, environment.primer, observation.state)
            while True:
                answer = await self.answer(transcript, request, attempt)
                if answer is None:
                    outcome = Outcome.TRUNCATED
                    break
                step = await self._call(environment, partial(environment.step, answer))
                if not math.isfinite(step.reward):
                    name = self.environment.type
                    raise EnvironmentFailure(f"{name} gave the reward {step.reward} for seed {request.seed}")
                transcript.reward(step.reward, dict(step.info))
                if step.terminated or step.truncated:
                    outcome = Outcome.TERMINATED if step.terminated else Outcome.TRUNCATED
                    break
                transcript.observe(step.messages, step.state, step.new_conversation)
        except (EnvironmentFailure, ChatRequestError) as error:
            failure = str(error)
        return Episode(
            seed=request.seed,
            group=request.group,
            index=request.index,
            version=self.version,
            streams=transcript.streams() if transcript else [],
            turns=transcript.turns if transcript else [],
            outcome=outcome,
            failure=failure,
            messages=transcript.messages if transcript else [],
        )

    async def _call(self, environment: Environment, function: Callable[[], T]) -> T:
        """Call the environment, in a thread if the recipe sets a time-out or the environment blocks.

        Any exception becomes an EnvironmentFailure, except InputError and WorkersLost, which would fail every episode.
        """
        seconds = self.rollout.environment_timeout
        try:
            if seconds is None and not environment.blocking:
                return function()
            return await asyncio.wait_for(asyncio.to_thread(function), seconds)
        except (InputError, WorkersLost):
            raise
        except TimeoutError as error:
            raise EnvironmentFailure(f"{self.environment.type} took longer than {seconds} s") from error
        except Exception as error:
            raise EnvironmentFailure(f"{self.environment.type} raised {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class RolloutWorker(EpisodeWorker[TokenTranscript]):
    """Plays episodes with the policy's own weights, through an engine that takes and returns token ids."""

    engine: Engine
    renderer: Renderer
    environment: EnvironmentRecipe
    rollout: RolloutRecipe
    sampling: SamplingRecipe
    version: int
    scorer: Scorer | None = None
    sharding: EpisodeSharding = EpisodeSharding.NONE

    @property
    def capacity(self) -> int:
        """Number of episodes that fit in the engine's cache."""
        return self.engine.capacity

    def begin(self, messages: Sequence[Message], primer: str, state: str | None) -> TokenTranscript:
        return TokenTranscript(self.renderer, messages, primer, state)

    async def run_episode(self, request: EpisodeRequest) -> Episode:
        """Play one episode. The engine keeps its cache entry until the episode ends."""
        with self.engine.episode(request.group):
            return await super().run_episode(request)

    async def answer(self, transcript: TokenTranscript, request: EpisodeRequest, attempt: int) -> str | None:
        """Generate the next answer and append its tokens. InputError if the first prompt already fills the context."""
        limit = self.rollout.tokens_per_episode
        room = limit - len(transcript.context)
        if room <= 0 and not transcript.turns:
            raise InputError(
                f"the prompt of environment seed {request.seed} has {len(transcript.context)} tokens and leaves no room "
                f"for an answer; raise rollout.tokens_per_episode = {limit}"
            )
        if room <= 0:
            return None
        completion = await self.engine.generate(
            Request(
                prompt_ids=tuple(transcript.context),
                sampling=self.sampling,
                seed=request.request_seed(attempt, len(transcript.turns)),
                max_tokens=min(self.rollout.tokens_per_turn, room),
                stop_strings=tuple(self.rollout.stop_strings),
            )
        )
        return transcript.answer(completion.ids, completion.logprobs, completion.stop_reason, completion.versions)


def collect_episodes(worker: EpisodeWorker[Any], requests: Sequence[EpisodeRequest]) -> list[Episode]:
    """Play and score all episodes; returns them in the order of `requests`.

    Several processes divide the episodes by `worker.sharding`. All processes must call this function together.
    """
    world = current()
    if worker.sharding is EpisodeSharding.NONE:
        episodes = _collect_here(worker, requests)
    elif worker.sharding is EpisodeSharding.RANK0:
        episodes = world.on_rank0(lambda: _collect_here(worker, requests))
    else:
        groups = {group: number for number, group in enumerate(dict.fromkeys(r.group for r in requests))}
        ranks = [groups[request.group] % world.size for request in requests]
        local = [request for request, rank in zip(requests, ranks, strict=True) if rank == world.rank]
        by_rank = [iter(part) for part in world.on_all_ranks(lambda: _collect_here(worker, local))]
        episodes = [next(by_rank[rank]) for rank in ranks]
    if worker.scorer is not None:
        worker.scorer(episodes)
    return episodes


def _collect_here(worker: EpisodeWorker[Any], requests: Sequence[EpisodeRequest]) -> list[Episode]:
    episodes: dict[int, Episode] = {}
    run_episodes(worker, requests, episodes.__setitem__)
    return [episodes[number] for number in range(len(requests))]


def run_episodes(
    worker: EpisodeWorker[Any], requests: Sequence[EpisodeRequest], on_episode: Callable[[int, Episode], None]
) -> None:
    """Play all episodes in this process, `worker.capacity` at a time, without scoring them.

    `on_episode(i, episode)` is called as soon as the episode of `requests[i]` ends. More episodes in flight than the
    engine's cache holds would evict each other's prefixes, and every turn would recompute its whole context.
    """
    remaining = deque(enumerate(requests))

    async def run_remaining() -> None:
        # Start the next episode in the same event-loop tick in which one ends; otherwise batch composition depends on
        # timing.
        while remaining:
            number, request = remaining.popleft()
            on_episode(number, await worker.run_episode(request))

    async def run() -> None:
        await asyncio.gather(*(run_remaining() for _ in range(min(len(requests), worker.capacity))))

    asyncio.run(run())
