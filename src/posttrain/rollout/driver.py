"""RolloutManager episodes: the policy answers, the environment steps, until the episode ends."""

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
from posttrain.episode import Episode, Outcome, Stream, Turn
from posttrain.errors import InputError, WorkersLost
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.recipe.rollout import RolloutRecipe, SamplingRecipe
from posttrain.rollout.transcript import TokenTranscript
from posttrain.seeds import derive_seed

T = TypeVar("T")


@dataclass(frozen=True)
class EpisodeRequest:
    """Where an episode stands: its task, its group, and the name of its random numbers."""

    seed: int
    """Environment seed."""
    group: int
    index: int
    rng_key: tuple[int | str, ...]
    """Name of the sampling stream, for example (run seed, "train", step, group, index)."""

    def request_seed(self, attempt: int, turn: int) -> int:
        """The seed of the answer of a turn, both counted from 0."""
        return derive_seed(*self.rng_key, attempt, turn)


class EpisodeSharding(Enum):
    """Who plays where several processes ask for the same episodes."""

    NONE = "none"
    """The process that asks, for itself."""
    GROUPS = "groups"
    """Each plays whole groups, and all get all of them."""
    FIRST = "first"
    """The first process plays, and all get what it played."""


class Scorer(Protocol):
    """Pays played episodes besides what their environment paid."""

    def __call__(self, episodes: Sequence[Episode]) -> None:
        """Add a reward to the last turn of each episode that did not fail, and to the stream that holds it."""
        ...


class Transcript(Protocol):
    """What is kept of one episode while it is played."""

    turns: list[Turn]
    messages: list[dict[str, Any]]
    """The conversation as text, answers included."""

    def reward(self, reward: float, info: dict[str, Any]) -> None:
        """Pay the last turn."""
        ...

    def observe(
        self, messages: Sequence[dict[str, Any]], state: str | None = None, new_conversation: bool = False
    ) -> None:
        """What the environment says next; the other arguments are those of its `Step`."""
        ...

    def streams(self) -> list[Stream]:
        """The tokens, where they are known."""
        ...


D = TypeVar("D", bound=Transcript)


class EpisodeWorker(ABC, Generic[D]):
    """Everything an episode needs besides its place. A subclass says who answers, and how."""

    environment: EnvironmentRecipe
    rollout: RolloutRecipe
    sampling: SamplingRecipe
    version: int
    """Of the policy's weights."""
    scorer: Scorer | None
    sharding: EpisodeSharding = EpisodeSharding.NONE

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Episodes to keep in flight at a time."""

    @abstractmethod
    def begin(self, messages: Sequence[Message], primer: str, state: str | None) -> D:
        """An episode's transcript, which opens with `messages`; each answer begins with `primer`."""

    @abstractmethod
    async def answer(self, transcript: D, place: EpisodeRequest, attempt: int) -> str | None:
        """The policy's next answer as text, kept as a turn of `transcript`; None where it has no room left.

        Raises ChatRequestError where whoever answers could not be asked.
        """

    async def run_episode(self, place: EpisodeRequest) -> Episode:
        """One episode. A failing environment fails this episode alone, after the retries the recipe allows."""
        failures = self.rollout.failures
        attempts = failures.retries + 1 if failures.action == "retry" else 1
        for attempt in range(attempts):
            episode = await self._attempt(place, attempt)
            if episode.outcome is not Outcome.FAILED:
                break
        return episode

    async def _attempt(self, place: EpisodeRequest, attempt: int) -> Episode:
        environment = open_environment(self.environment)
        transcript: D | None = None
        failure: str | None = None
        outcome = Outcome.FAILED
        try:
            observation = await self._call(environment, partial(environment.reset, place.seed))
            transcript = self.begin(observation.messages, environment.primer, observation.state)
            outcome = await self._turns(environment, transcript, place, attempt)
        except (EnvironmentFailure, ChatRequestError) as error:
            failure = str(error)
        return Episode(
            seed=place.seed,
            group=place.group,
            index=place.index,
            version=self.version,
            streams=transcript.streams() if transcript else [],
            turns=transcript.turns if transcript else [],
            outcome=outcome,
            failure=failure,
            messages=transcript.messages if transcript else [],
        )

    async def _turns(self, environment: Environment, transcript: D, place: EpisodeRequest, attempt: int) -> Outcome:
        """Turns until the end; returns how the episode ended."""
        while True:
            answer = await self.answer(transcript, place, attempt)
            if answer is None:
                return Outcome.TRUNCATED
            step = await self._call(environment, partial(environment.step, answer))
            if not math.isfinite(step.reward):
                raise EnvironmentFailure(f"{self.environment.type} gave the reward {step.reward} for seed {place.seed}")
            transcript.reward(step.reward, dict(step.info))
            if step.terminated:
                return Outcome.TERMINATED
            if step.truncated:
                return Outcome.TRUNCATED
            transcript.observe(step.messages, step.state, step.new_conversation)

    async def _call(self, environment: Environment, function: Callable[[], T]) -> T:
        """Call the environment, in a thread where the recipe sets a time-out or it waits for others.

        Anything it raises is its failure.
        """
        seconds = self.rollout.environment_timeout
        try:
            if seconds is None and not environment.blocking:
                return function()
            return await asyncio.wait_for(asyncio.to_thread(function), seconds)
        except (InputError, WorkersLost):
            # The recipe asks for what is not there, or workers died too often: no other episode would fare better.
            raise
        except TimeoutError as error:
            raise EnvironmentFailure(f"{self.environment.type} took longer than {seconds} s") from error
        except Exception as error:
            raise EnvironmentFailure(f"{self.environment.type} raised {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class RolloutWorker(EpisodeWorker[TokenTranscript]):
    """The policy's own weights answer, through an engine in this process."""

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
        """As many as the engine keeps in its cache."""
        return self.engine.capacity

    def begin(self, messages: Sequence[Message], primer: str, state: str | None) -> TokenTranscript:
        return TokenTranscript(self.renderer, messages, primer, state)

    async def run_episode(self, place: EpisodeRequest) -> Episode:
        """One episode, open in the engine until it ends."""
        with self.engine.episode(place.group):
            return await super().run_episode(place)

    async def answer(self, transcript: TokenTranscript, place: EpisodeRequest, attempt: int) -> str | None:
        """The next answer, its tokens appended; None where the episode has no room for one."""
        room = self.rollout.tokens_per_episode - len(transcript.context)
        if room <= 0 and not transcript.turns:
            raise InputError(
                f"the prompt of environment seed {place.seed} has {len(transcript.context)} tokens and leaves no room "
                f"for an answer; raise rollout.tokens_per_episode = {self.rollout.tokens_per_episode}"
            )
        if room <= 0:
            return None
        request = Request(
            prompt_ids=tuple(transcript.context),
            sampling=self.sampling,
            seed=place.request_seed(attempt, len(transcript.turns)),
            max_tokens=min(self.rollout.tokens_per_turn, room),
            stop_strings=tuple(self.rollout.stop_strings),
        )
        completion = await self.engine.generate(request)
        return transcript.answer(completion.ids, completion.logprobs, completion.stop_reason, completion.versions)


class EnvironmentFailure(Exception):
    """An environment raised, timed out or paid a reward that is not a number."""


def collect_episodes(player: EpisodeWorker[Any], places: Sequence[EpisodeRequest]) -> list[Episode]:
    """Play all episodes, `player.capacity` at a time; returns them in the order of `places`. Several processes share the
    playing as `player.sharding` says, and score together."""
    world = current()
    if player.sharding is EpisodeSharding.NONE:
        played = _play_here(player, places)
    elif player.sharding is EpisodeSharding.RANK0:
        played = world.on_rank0(lambda: _play_here(player, places))
    else:
        groups = {group: number for number, group in enumerate(dict.fromkeys(place.group for place in places))}
        owners = [groups[place.group] % world.size for place in places]
        own = [place for place, owner in zip(places, owners, strict=True) if owner == world.rank]
        parts = [iter(part) for part in world.on_all_ranks(lambda: _play_here(player, own))]
        played = [next(parts[owner]) for owner in owners]
    if player.scorer is not None:
        player.scorer(played)
    return played


def _play_here(player: EpisodeWorker[Any], places: Sequence[EpisodeRequest]) -> list[Episode]:
    episodes: dict[int, Episode] = {}
    run_episodes(player, places, episodes.__setitem__)
    return [episodes[number] for number in range(len(places))]


def run_episodes(
    player: EpisodeWorker[Any], places: Sequence[EpisodeRequest], ended: Callable[[int, Episode], None]
) -> None:
    """Play all episodes, `player.capacity` at a time; `ended` is called with the number of a place, from 0, and its
    episode as soon as that has ended. Nothing is scored.

    An engine keeps as many in its cache: more at a time would push each other's earlier turns out of it, and every
    turn would compute its whole context again. A player that ends an episode begins the next one in the same breath, so that what is in flight
    does not depend on timing.
    """
    remaining = deque(enumerate(places))

    async def play_on() -> None:
        while remaining:
            number, place = remaining.popleft()
            ended(number, await player.run_episode(place))

    async def run() -> None:
        await asyncio.gather(*(play_on() for _ in range(min(len(places), player.capacity))))

    asyncio.run(run())
