"""The episode driver: the policy answers, the environment steps, until the episode ends.

An `EpisodeRequest` is one episode to play, and an `EpisodeWorker` plays it with a `Transcript`. `collect_episodes`
plays the episodes of a step. `rollout` is the public function for your own training loop.
"""

import asyncio
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from posttrain.data.rendering import Renderer
from posttrain.distributed.world import current_world
from posttrain.engines.openai import ChatRequestError
from posttrain.engines.protocol import Engine, Request
from posttrain.environments.protocol import (
    LARGEST_REWARD,
    Action,
    CallTimeout,
    Environment,
    EnvironmentFactory,
    Observation,
    ProtocolError,
    Step,
    described,
    ended_within,
    require_observation,
    require_step,
)
from posttrain.environments.rewards import replace_blocked_loop
from posttrain.episode import Episode, Outcome
from posttrain.errors import InputError, RunError, WorkersLost, require_type
from posttrain.recipe.compose import section
from posttrain.recipe.rollout import ENVIRONMENT_TIMEOUT, MOST_EPISODES, FailureRecipe, RolloutRecipe, SamplingRecipe
from posttrain.rollout.transcript import TokenTranscript, Transcript
from posttrain.seeds import derive_seed

T = TypeVar("T")


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


class _EpisodeInterrupted(Exception):
    """A signal handler raised a KeyboardInterrupt inside an episode.

    A task must not end with a KeyboardInterrupt: asyncio raises it out of the event loop a second time while it cancels
    the other tasks, and reports them as never retrieved.
    """

    def __init__(self, interrupt: KeyboardInterrupt) -> None:
        super().__init__()
        self.interrupt = interrupt


TranscriptT = TypeVar("TranscriptT", bound=Transcript)


class EnvironmentFailure(Exception):
    """An environment raised an exception, timed out, or returned something that the protocol does not allow."""


def outcome_of(step: Step) -> Outcome:
    """The outcome of an episode that ends with `step`."""
    if not step.scored:
        return Outcome.UNSCORED
    return Outcome.TERMINATED if step.terminated else Outcome.TRUNCATED


Scorer = Callable[[Sequence[Episode]], None]
"""Adds a reward, such as that of a reward model, to the last turn of each episode that did not fail and to its stream."""


@dataclass(frozen=True, kw_only=True)
class EpisodeWorker(ABC, Generic[TranscriptT]):
    """Plays episodes: `run_episode` drives the environment, and a subclass supplies the answers."""

    environment: EnvironmentFactory
    rollout: RolloutRecipe
    sampling: SamplingRecipe
    version: int = 0
    """Version of the policy's weights."""
    scorer: Scorer | None = None
    sharding: Literal["none", "by_group", "rank0"] = "none"
    """Of the episodes that all of several processes request: `none`: each plays its own; `by_group`: each plays whole groups;
    `rank0`: rank 0 plays all. In the latter two, all processes receive all episodes."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Number of episodes to keep in flight."""

    @abstractmethod
    def begin(self, observation: Observation, primer: str) -> TranscriptT:
        """A new transcript that opens with `observation`. Every answer starts with the text `primer`."""

    @abstractmethod
    async def answer(self, transcript: TranscriptT, request: EpisodeRequest, attempt: int) -> Action | None:
        """Generate the next answer and append it to `transcript` as a turn.

        Returns the answer for the environment, or None if the token budget leaves no room for an answer. Raises
        ChatRequestError if a remote model does not answer.
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
        transcript: TranscriptT | None = None
        outcome, failure = Outcome.FAILED, None
        try:
            environment, observation = await self._start(request.seed)
            transcript = self.begin(observation, environment.primer)
            while True:
                answer = await self.answer(transcript, request, attempt)
                if answer is None:
                    outcome = Outcome.TRUNCATED
                    break
                step = await self._step(environment, answer, request.seed)
                transcript.reward(step.reward, dict(step.info))
                if step.terminated or step.truncated:
                    outcome = outcome_of(step)
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

    async def _start(self, seed: int) -> tuple[Environment, Observation]:
        """A new environment and its first observation."""
        environment = await self._call(self.environment)
        observation = await self._call(partial(environment.reset, seed), environment.blocking)
        return environment, self._checked(require_observation, observation)

    async def _step(self, environment: Environment, action: Action, seed: int) -> Step:
        step = await self._call(partial(environment.take, action), environment.blocking)
        step = self._checked(require_step, step)
        if not abs(step.reward) <= LARGEST_REWARD:
            raise EnvironmentFailure(f"{self.environment.recipe.type} gave the reward {step.reward} for seed {seed}")
        return step

    def _checked(self, require: Callable[[object], T], returned: object) -> T:
        try:
            return require(returned)
        except ProtocolError as error:
            raise EnvironmentFailure(f"{self.environment.recipe.type}: {error}") from error
        except Exception as error:  # of a mapping or number that the environment made
            raise EnvironmentFailure(
                f"{self.environment.recipe.type} returned an object that raised {described(error)}"
            ) from error

    async def _call(self, function: Callable[[], T], blocking: bool = False) -> T:
        """Call the environment in a daemon thread, so that a signal ends the run also if the call does not return.

        Anything that the call raises becomes an EnvironmentFailure, except InputError and WorkersLost, which would fail
        every episode.
        """
        seconds, name = self.rollout.environment_timeout, self.environment.recipe.type
        result, error = await ended_within(function, seconds, one_at_a_time=not blocking)
        if isinstance(error, InputError | WorkersLost):
            raise error
        if isinstance(error, CallTimeout):
            replace_blocked_loop()
            raise EnvironmentFailure(f"{name} {error}")
        if error is not None:
            raise EnvironmentFailure(f"{name} raised {described(error)}") from error
        return result


@dataclass(frozen=True, kw_only=True)
class RolloutWorker(EpisodeWorker[TokenTranscript]):
    """Plays episodes with the policy's own weights, through an engine that takes and returns token ids."""

    engine: Engine
    renderer: Renderer

    @property
    def capacity(self) -> int:
        """Number of episodes that fit in the engine's cache."""
        return self.engine.capacity

    def begin(self, observation: Observation, primer: str) -> TokenTranscript:
        return TokenTranscript(self.renderer, observation.messages, primer, observation.state, observation.tools)

    async def run_episode(self, request: EpisodeRequest) -> Episode:
        """Play one episode. The engine keeps its cache entry until the episode ends."""
        with self.engine.episode(request.group):
            return await super().run_episode(request)

    async def answer(self, transcript: TokenTranscript, request: EpisodeRequest, attempt: int) -> Action | None:
        """Generate the next answer and append its tokens. InputError if the first prompt already fills the context."""
        limit = self.rollout.tokens_per_episode
        room = limit - len(transcript.context)
        if room <= 0:
            if transcript.turns:
                return None
            raise InputError(
                f"the prompt of environment seed {request.seed} has {len(transcript.context)} tokens and leaves no room "
                f"for an answer; raise rollout.tokens_per_episode = {limit}"
            )
        completion = await self.engine.generate(
            Request(
                prompt_ids=tuple(transcript.context),
                sampling=self.sampling,
                seed=request.request_seed(attempt, len(transcript.turns)),
                max_tokens=min(self.rollout.tokens_per_turn, room),
                stop_strings=tuple(self.rollout.stop_strings),
            )
        )
        known = completion.versions, completion.experts
        transcript.answer(completion.ids, completion.logprobs, completion.stop_reason, *known)
        return transcript.action


Played = Callable[[int, int], None]
"""Called as the parts of some work end, such as the episodes of a step, with the number of finished parts and of all."""


def quiet(done: int, total: int) -> None:
    """Report no progress."""


def collect_episodes(
    worker: EpisodeWorker[Any], requests: Sequence[EpisodeRequest], played: Played = quiet
) -> list[Episode]:
    """Play and score all episodes; returns them in the order of `requests`.

    Several processes divide the episodes by `worker.sharding`. All processes must call this function together.
    """
    world = current_world()
    if worker.sharding == "none":
        episodes = _collect_here(worker, requests, played)
    elif worker.sharding == "rank0":
        episodes = world.on_rank0(lambda: _collect_here(worker, requests, played))
    else:
        groups = {group: number for number, group in enumerate(dict.fromkeys(r.group for r in requests))}
        ranks = [groups[request.group] % world.size for request in requests]
        local = [request for request, rank in zip(requests, ranks, strict=True) if rank == world.rank]
        by_rank = [iter(part) for part in world.on_all_ranks(lambda: _collect_here(worker, local, played))]
        episodes = [next(by_rank[rank]) for rank in ranks]
    if worker.scorer is not None:
        worker.scorer(episodes)
    return episodes


def _collect_here(worker: EpisodeWorker[Any], requests: Sequence[EpisodeRequest], played: Played) -> list[Episode]:
    episodes: dict[int, Episode] = {}

    def keep(number: int, episode: Episode) -> None:
        episodes[number] = episode
        played(len(episodes), len(requests))

    run_episodes(worker, requests, keep)
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
            try:
                on_episode(number, await worker.run_episode(request))
            except KeyboardInterrupt as error:
                raise _EpisodeInterrupted(error) from None

    async def run() -> None:
        await asyncio.gather(*(run_remaining() for _ in range(min(len(requests), worker.capacity))))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        try:
            asyncio.run(run())
        except _EpisodeInterrupted as error:
            raise error.interrupt from None
    else:
        # A notebook already runs an event loop in this thread.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, run()).result()


def rollout(
    engine: Engine,
    env: EnvironmentFactory,
    seeds: Sequence[int],
    *,
    episodes_per_group: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    max_tokens: int = 64,
    tokens_per_episode: int = 2048,
    stop_strings: Sequence[str] = (),
    environment_timeout: float | None = ENVIRONMENT_TIMEOUT,
    failures: FailureRecipe | Mapping[str, Any] | None = None,
    run_seed: int = 0,
    step: int = 0,
) -> list[Episode]:
    """Sample episodes with the engine's current weights.

        episodes = posttrain.rollout(engine, env, seeds=range(8), episodes_per_group=8, step=step)

    Args:
        engine: a `LocalEngine` or `VllmEngine` over the policy.
        env: the result of `make_env`.
        seeds: environment seeds, one task each. The episodes of one seed form a group, numbered from 0.
        episodes_per_group: episodes of each seed.
        temperature: 0 is greedy. Log-probabilities in the episodes are those of the tempered distribution in nats,
            before `top_p`, `top_k` and `min_p` cut it.
        max_tokens: maximum number of tokens sampled in one turn.
        tokens_per_episode: maximum number of tokens of an episode's context, prompt included.
        stop_strings: texts that end a turn besides the model's end token.
        environment_timeout: time-out of one call of the environment in seconds; None: no limit. See
            `rollout.environment_timeout` in a recipe.
        failures: keys of `rollout.failures` in a recipe: what happens to an episode whose environment raised or timed
            out. By default such episodes are left out with a warning.
        run_seed, step: name the random numbers. The same pair gives the same episodes on a CPU in float32.

    Returns:
        Episodes in the order of seeds. `Episode.total_reward` and `Episode.success` summarize an episode. Episodes to
        which no reward applies are left out, with a warning.

    Raises:
        RunError: more than `failures.max_share` of the episodes failed.
        InputError: an argument is wrong, or the prompt of a seed leaves no room for an answer.
    """
    if not (hasattr(engine, "policy") and hasattr(engine, "generate")):
        raise InputError(
            f"the argument `engine` has the type {type(engine).__name__}; pass a LocalEngine or VllmEngine"
        )
    require_type("env", env, EnvironmentFactory)
    require_type("seeds", seeds, Sequence, np.ndarray)
    seeds = list(islice(seeds, MOST_EPISODES + 1))
    for name, value in (*(("seeds", seed) for seed in seeds), ("run_seed", run_seed), ("step", step)):
        require_type(name, value, int)
        if not 0 <= value < 2**63:
            raise InputError(f"the argument `{name}` has {value}; pass whole numbers from 0 to 2^63 - 1")
    seeds = [int(seed) for seed in seeds]
    settings = section(
        RolloutRecipe,
        groups_per_step=max(len(seeds), 1),
        episodes_per_group=episodes_per_group,
        tokens_per_turn=max_tokens,
        tokens_per_episode=tokens_per_episode,
        stop_strings=stop_strings,
        environment_timeout=environment_timeout,
        failures=FailureRecipe() if failures is None else failures,
    )
    sampling = section(SamplingRecipe, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    policy = engine.policy
    worker = RolloutWorker(
        engine=engine,
        renderer=Renderer(policy.tokenizer, policy.end_tokens),
        environment=env,
        rollout=settings,
        sampling=sampling,
        version=policy.version,
    )
    requests = [
        EpisodeRequest(seed, group, index, (run_seed, "sampling", step, group, index))
        for group, seed in enumerate(seeds)
        for index in range(settings.episodes_per_group)
    ]
    engine.load_weights(policy.version)
    episodes = collect_episodes(worker, requests)
    engine.sleep()
    usable, message = without_failures(episodes, settings.failures)
    for text in (message, unscored_message(episodes)):
        if text:
            warnings.warn(text, stacklevel=2)
    return usable


def unscored_message(episodes: Sequence[Episode]) -> str:
    """A sentence about the episodes to which no reward applies; empty if there are none."""
    count = sum(e.outcome is Outcome.UNSCORED for e in episodes)
    cause = "environment.reward returned None, or the last step has scored=False"
    return f"no reward applies to {count} of {len(episodes)} episodes, which are left out: {cause}" if count else ""


def without_failures(episodes: Sequence[Episode], failures: FailureRecipe) -> tuple[list[Episode], str]:
    """The episodes to learn from: failed ones are left out or get the reward that `failures` sets, and those to which no
    reward applies are left out.

    Returns them with a sentence about the failed ones, empty if there are none. RunError if too many failed.
    """
    failed = [e for e in episodes if e.outcome is Outcome.FAILED]
    if not failed:
        return [e for e in episodes if e.has_return], ""
    first = failed[0]
    message = (
        f"{len(failed)} of {len(episodes)} episodes failed, the first in group {first.group} "
        f"(environment seed {first.seed}): {first.failure}"
    )
    if len(failed) > failures.max_share * len(episodes):
        raise RunError(
            f"{message}; that is more than rollout.failures.max_share = {failures.max_share}; correct the environment or "
            "its reward, then resume the run"
        )
    if failures.action != "score":
        return [e for e in episodes if e.has_return], message
    for episode in failed:
        if episode.turns:
            last = episode.turns[-1]
            correction = failures.reward - episode.total_reward
            last.reward += correction
            episode.streams[last.stream].rewards[last.stop - 1] += correction
    return [e for e in episodes if e.streams and e.outcome is not Outcome.UNSCORED], message
