"""Playing episodes: the policy answers, the environment steps, until the episode ends."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from posttrain.data.rendering import Renderer
from posttrain.engines.protocol import Engine, Request
from posttrain.environments.protocol import Environment
from posttrain.errors import InputError
from posttrain.recipe.components import EnvironmentRecipe, environment_class
from posttrain.recipe.rollout import RolloutRecipe, SamplingRecipe
from posttrain.rollout.conversation import Conversation
from posttrain.rollout.streams import Episode, Outcome
from posttrain.seeds import derive_seed

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where an episode stands: its task, its group, and the name of its random numbers."""

    seed: int
    """Environment seed."""
    group: int
    index: int
    stream: tuple[int | str, ...]
    """Name of the sampling stream, for example (run seed, "train", step, group, index)."""


class Scorer(Protocol):
    """Pays played episodes besides what their environment paid."""

    def __call__(self, episodes: Sequence[Episode]) -> None:
        """Add a reward to the last turn of each episode that did not fail, and to the stream that holds it."""
        ...


@dataclass(frozen=True)
class Player:
    """Everything an episode needs besides its place."""

    engine: Engine
    renderer: Renderer
    environment: EnvironmentRecipe
    rollout: RolloutRecipe
    sampling: SamplingRecipe
    version: int
    scorer: Scorer | None = None

    async def play(self, place: Place) -> Episode:
        """One episode. A failing environment fails this episode alone, after the retries the recipe allows."""
        failures = self.rollout.failures
        attempts = failures.retries + 1 if failures.policy == "retry" else 1
        with self.engine.episode():
            for attempt in range(attempts):
                episode = await self._attempt(place, attempt)
                if episode.outcome is not Outcome.FAILED:
                    break
        return episode

    async def _attempt(self, place: Place, attempt: int) -> Episode:
        environment: Environment = environment_class(self.environment.type)(self.environment)
        conversation: Conversation | None = None
        failure: str | None = None
        outcome = Outcome.FAILED
        try:
            observation = await self._call(partial(environment.reset, place.seed))
            conversation = Conversation(self.renderer, observation.messages, environment.primer, observation.state)
            outcome = await self._turns(environment, conversation, place, attempt)
        except EnvironmentFailure as error:
            failure = str(error)
        return Episode(
            seed=place.seed,
            group=place.group,
            index=place.index,
            version=self.version,
            streams=conversation.streams() if conversation else [],
            turns=conversation.turns if conversation else [],
            outcome=outcome,
            failure=failure,
            messages=conversation.messages if conversation else [],
        )

    async def _turns(self, environment: Environment, conversation: Conversation, place: Place, attempt: int) -> Outcome:
        """Turns until the end; returns how the episode ended."""
        while True:
            room = self.rollout.tokens_per_episode - len(conversation.context)
            if room <= 0 and not conversation.turns:
                raise InputError(
                    f"the prompt of environment seed {place.seed} has {len(conversation.context)} tokens and leaves no room "
                    f"for an answer; raise rollout.tokens_per_episode = {self.rollout.tokens_per_episode}"
                )
            if room <= 0:
                return Outcome.TRUNCATED
            request = Request(
                prompt_ids=tuple(conversation.context),
                sampling=self.sampling,
                seed=derive_seed(*place.stream, attempt, len(conversation.turns)),
                max_tokens=min(self.rollout.tokens_per_turn, room),
                stop_strings=tuple(self.rollout.stop_strings),
            )
            completion = await self.engine.generate(request)
            answer = conversation.answer(completion.ids, completion.logprobs, completion.stop_reason)
            step = await self._call(partial(environment.step, answer))
            if not math.isfinite(step.reward):
                raise EnvironmentFailure(f"{self.environment.type} gave the reward {step.reward} for seed {place.seed}")
            conversation.reward(step.reward, dict(step.info))
            if step.terminated:
                return Outcome.TERMINATED
            if step.truncated:
                return Outcome.TRUNCATED
            conversation.observe(step.messages, step.state)

    async def _call(self, function: Callable[[], T]) -> T:
        """Call the environment, in a thread where the recipe sets a time-out; anything it raises is its failure."""
        seconds = self.rollout.environment_seconds
        try:
            if seconds is None:
                return function()
            return await asyncio.wait_for(asyncio.to_thread(function), seconds)
        except InputError:
            # The recipe asks for what is not there, and no other episode would fare better.
            raise
        except TimeoutError as error:
            raise EnvironmentFailure(f"{self.environment.type} took longer than {seconds} s") from error
        except Exception as error:
            raise EnvironmentFailure(f"{self.environment.type} raised {type(error).__name__}: {error}") from error


class EnvironmentFailure(Exception):
    """An environment raised, timed out or paid a reward that is not a number."""


def play_all(player: Player, places: Sequence[Place]) -> list[Episode]:
    """Play all episodes, as many at a time as the engine keeps in its cache; returns them in the order of `places`.

    More at a time would push each other's earlier turns out of the cache, and every turn would compute its whole
    context again. A player that ends an episode begins the next one in the same breath, so that what is in flight
    does not depend on timing.
    """
    remaining = deque(enumerate(places))
    episodes: dict[int, Episode] = {}

    async def play_on() -> None:
        while remaining:
            number, place = remaining.popleft()
            episodes[number] = await player.play(place)

    async def run() -> None:
        await asyncio.gather(*(play_on() for _ in range(min(len(places), player.engine.capacity))))

    asyncio.run(run())
    played = [episodes[number] for number in range(len(places))]
    if player.scorer is not None:
        player.scorer(played)
    return played
