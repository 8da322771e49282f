"""Episodes that a model behind an OpenAI-compatible server plays: text in, text out, and no token ids."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Any, Protocol

from posttrain.engines.openai import ChatCompletion, complete
from posttrain.environments.protocol import Message
from posttrain.episode import Episode, Outcome, StopReason, Stream, Turn
from posttrain.errors import InputError, RunError
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.recipe.engines import OpenAIEngineRecipe, has_thinking, no_primer
from posttrain.recipe.rollout import FailureRecipe, RolloutRecipe, SamplingRecipe
from posttrain.rollout.driver import EpisodeRequest, EpisodeWorker, Scorer

THOUGHTS = "thoughts"
"""Key of a turn's info that holds what the server gave as thinking, where the environment's format has none."""
_SEEDS = 2**31
"""Seeds are below this: some servers take 32 bits."""


def server_seed(place: EpisodeRequest, attempt: int, turn: int) -> int:
    """The seed that a server is sent with the request of a turn."""
    return place.request_seed(attempt, turn) % _SEEDS


class TextTranscript:
    """One episode's messages. A turn starts at 0 and stops at the number of tokens that the server counts for it, which
    is 0 where it does not say."""

    def __init__(self, messages: Sequence[Message], state: str | None = None) -> None:
        self.messages: list[dict[str, Any]] = list(messages)
        self.turns: list[Turn] = []
        self._state = state
        self._first = 0
        """Where in `messages` the conversation that the model sees begins."""

    @property
    def seen(self) -> list[dict[str, Any]]:
        """The messages that the next answer follows."""
        return self.messages[self._first :]

    def said(self, text: str, tokens: int, stop_reason: StopReason, thoughts: str = "") -> None:
        """Keep an answer; `thoughts` are those that `text` does not hold."""
        info = {THOUGHTS: thoughts} if thoughts else {}
        self.turns.append(Turn(0, 0, tokens, 0.0, stop_reason, text, info, self._state))
        self.messages.append({"role": "assistant", "content": text})

    def reward(self, reward: float, info: dict[str, Any]) -> None:
        turn = self.turns[-1]
        turn.reward, turn.info = reward, turn.info | info

    def observe(
        self, messages: Sequence[dict[str, Any]], state: str | None = None, new_conversation: bool = False
    ) -> None:
        self._state = state
        if new_conversation:
            self._first = len(self.messages)
        self.messages.extend(messages)

    def streams(self) -> list[Stream]:
        """None: a server tells no token ids."""
        return []


class FailureMonitor(Protocol):
    """Takes note of every episode, and says when there were too many failures to go on."""

    def record(self, episode: Episode) -> None:
        """Take note of a played episode; RunError where it is one failure too many."""
        ...


class FailureLimit:
    """The failed episodes of an evaluation. Too many of them end it: what is left would not speak for the model."""

    def __init__(self, failures: FailureRecipe, episodes: int) -> None:
        """`episodes`: how many are to be played."""
        self.episodes = episodes
        self.failed = 0
        self._first: Episode | None = None
        self._share = failures.max_share

    def record(self, episode: Episode) -> None:
        """Take note of a played episode; RunError as soon as more failed than the recipe allows, or all."""
        if episode.outcome is not Outcome.FAILED:
            return
        self.failed += 1
        self._first = first = self._first or episode
        told = f"{self.failed} of {self.episodes} episodes failed, the first on environment seed {first.seed}: {first.failure}"
        if self.failed > self._share * self.episodes:
            raise RunError(
                f"{told}; that is more than rollout.failures.max_share = {self._share}, so nothing is reported"
            )
        if self.failed == self.episodes:
            raise RunError(f"{told}; nothing is left to report")


@dataclass(frozen=True)
class RemoteRolloutWorker(EpisodeWorker[TextTranscript]):
    """The model of `engine` answers. What fails at its server fails the episode, and is no answer."""

    client: Any
    """That of `chat_client`."""
    engine: OpenAIEngineRecipe
    failure_monitor: FailureMonitor
    environment: EnvironmentRecipe
    rollout: RolloutRecipe
    sampling: SamplingRecipe
    version: int = 0
    scorer: Scorer | None = None

    @property
    def capacity(self) -> int:
        return self.engine.max_concurrent

    def begin(self, messages: Sequence[Message], primer: str, state: str | None) -> TextTranscript:
        """InputError for an environment that begins the answers itself: a chat server lets nobody do that."""
        if primer:
            raise InputError(no_primer(self.environment, primer))
        return TextTranscript(messages, state)

    async def run_episode(self, place: EpisodeRequest) -> Episode:
        """One episode; RunError where it is the failure that is one too many."""
        episode = await super().run_episode(place)
        self.failure_monitor.record(episode)
        return episode

    async def answer(self, transcript: TextTranscript, place: EpisodeRequest, attempt: int) -> str:
        """The next answer. Raises ChatRequestError where the server gives none."""
        seed = server_seed(place, attempt, len(transcript.turns))
        written = await self._asked(transcript.seen, seed)
        thinking = has_thinking(self.environment)
        text, at_string = self._ended_text(written, written.text_with_reasoning() if thinking else written.text)
        reason = StopReason.END_TOKEN if written.finished else StopReason.TURN_BUDGET
        reason = StopReason.STOP_STRING if at_string else reason
        transcript.said(text, written.tokens or 0, reason, "" if thinking else written.reasoning)
        return text

    async def _asked(self, messages: Sequence[dict[str, Any]], seed: int) -> ChatCompletion:
        """What `_ask` gives, in a thread that no interrupted program waits for."""
        written: Future[ChatCompletion] = Future()

        def ask() -> None:
            written.set_running_or_notify_cancel()
            try:
                written.set_result(self._ask(messages, seed))
            except BaseException as error:
                written.set_exception(error)

        Thread(target=ask, name="remote model", daemon=True).start()
        return await asyncio.wrap_future(written)

    def _ask(self, messages: Sequence[dict[str, Any]], seed: int) -> ChatCompletion:
        engine, sampling, most = self.engine, self.sampling, self.rollout.tokens_per_turn
        extra = dict(engine.extra_body)
        if sampling.top_p < 1:
            extra["top_p"] = sampling.top_p
        if engine.token_limit_field != "max_tokens":
            extra[engine.token_limit_field] = most
        return complete(
            "model",
            self.client,
            engine.model,
            messages,
            temperature=sampling.temperature,
            max_tokens=most if engine.token_limit_field == "max_tokens" else None,
            stop=self.rollout.stop_strings if engine.stop_at == "server" else (),
            seed=seed if engine.send_seed and sampling.temperature > 0 else None,
            extra=extra,
        )

    def _ended_text(self, written: ChatCompletion, text: str) -> tuple[str, bool]:
        """The text up to its first stop string, which is kept, and whether there is one.

        Servers leave the stop string out, and an answer without it means something else: where it cannot be known,
        InputError.
        """
        stops = self.rollout.stop_strings
        after = len(text) - len(written.text)  # thoughts that the server set apart end nothing
        ends = [place + len(stop) for stop in stops if (place := text.find(stop, after)) >= 0]
        if ends:
            return text[: min(ends)], True
        if not stops or self.engine.stop_at == "here" or not written.finished:
            return text, False
        if written.stop_string is None:
            raise InputError(
                f"the server at {self.engine.url} does not say at which of rollout.stop_strings it stopped, and leaves it "
                "out; set engine.stop_at=here"
            )
        return text + written.stop_string, bool(written.stop_string)
