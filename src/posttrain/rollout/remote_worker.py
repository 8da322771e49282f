"""A rollout worker for models behind an OpenAI-compatible server: text in, text out, no token ids."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from posttrain.data.tools import hermes_text, parse_served
from posttrain.engines.openai import ChatCompletion, complete
from posttrain.environments.protocol import Action, Observation, ended_within
from posttrain.episode import Episode, Outcome, StopReason, Turn
from posttrain.errors import InputError, RunError
from posttrain.recipe.engines import OpenAIEngineRecipe, has_thinking, no_primer
from posttrain.recipe.rollout import FailureRecipe
from posttrain.rollout.driver import EpisodeRequest, EpisodeWorker
from posttrain.rollout.transcript import Transcript

THOUGHTS = "thoughts"
"""Key of `Turn.info` for thinking that the server returns separately, if the environment's format has no thinking."""
_SEEDS = 2**31
"""Seeds are below this, because some servers accept 32 bits only."""


def server_seed(request: EpisodeRequest, attempt: int, turn: int) -> int:
    """The seed sent to a server with the request of one turn."""
    return request.request_seed(attempt, turn) % _SEEDS


class TextTranscript(Transcript):
    """The messages of one episode without token ids.

    Each turn spans positions 0 to the number of tokens that the server reports, 0 if it reports none.
    """

    @property
    def context(self) -> list[dict[str, Any]]:
        """The messages that the next answer follows."""
        return self._shown[self._first :]

    def answer(
        self, text: str, tokens: int, stop_reason: StopReason, thoughts: str = "", calls: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Append an answer as a turn. `thoughts` is thinking that `text` does not contain, `calls` are the calls that
        the server parsed."""
        info = {THOUGHTS: thoughts} if thoughts else {}
        self.action = text
        sent: dict[str, Any] = {"role": "assistant", "content": text}
        if self.tools:
            self.action = parsed = parse_served(text, calls)
            if parsed.calls and not parsed.errors:
                sent = parsed.message(len(self.turns))
                for call in sent["tool_calls"]:
                    call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            text = hermes_text(parsed)
        self._shown.append(sent)
        self.turns.append(Turn(0, 0, tokens, 0.0, stop_reason, text, info, self._state))
        self.messages.append({"role": "assistant", "content": text})


class FailureLimit:
    """Ends an evaluation in which too many episodes fail, because the rest would not represent the model."""

    def __init__(self, failures: FailureRecipe, episodes: int) -> None:
        """`episodes`: total number of episodes of the evaluation."""
        self.episodes = episodes
        self.failed = 0
        self._first: Episode | None = None
        self._max_share = failures.max_share

    def __call__(self, episode: Episode) -> None:
        """RunError as soon as all episodes failed, or a larger share than `rollout.failures.max_share`."""
        if episode.outcome is not Outcome.FAILED:
            return
        self.failed += 1
        self._first = first = self._first or episode
        summary = f"{self.failed} of {self.episodes} episodes failed, the first on environment seed {first.seed}: {first.failure}"
        if self.failed > self._max_share * self.episodes:
            raise RunError(
                f"{summary}; this exceeds rollout.failures.max_share = {self._max_share}, so nothing is reported"
            )
        if self.failed == self.episodes:
            raise RunError(f"{summary}; there is nothing to report")


@dataclass(frozen=True, kw_only=True)
class RemoteRolloutWorker(EpisodeWorker[TextTranscript]):
    """Plays episodes with a model behind a server. A failed request fails the episode and never counts as an answer."""

    client: Any
    """As returned by `chat_client`."""
    engine: OpenAIEngineRecipe
    record: Callable[[Episode], None]
    """Called with each finished episode. Raises if too many have failed."""

    @property
    def capacity(self) -> int:
        return self.engine.max_concurrent

    def begin(self, observation: Observation, primer: str) -> TextTranscript:
        """InputError for an environment with a primer: chat servers cannot continue a started answer."""
        if primer:
            raise InputError(no_primer(self.environment.recipe, primer))
        return TextTranscript(observation.messages, observation.state, observation.tools)

    async def run_episode(self, request: EpisodeRequest) -> Episode:
        """Play one episode. Raises the exceptions of `record`."""
        episode = await super().run_episode(request)
        self.record(episode)
        return episode

    async def answer(self, transcript: TextTranscript, request: EpisodeRequest, attempt: int) -> Action:
        """Request the next answer and append it. ChatRequestError if the server returns none."""
        seed = server_seed(request, attempt, len(transcript.turns))
        # From a daemon thread, so that an interrupted program does not wait for the server.
        send = partial(self._send, transcript.context, seed, transcript.tools)
        completion, error = await ended_within(send, None, one_at_a_time=False)
        if error is not None:
            raise error
        thinking = has_thinking(self.environment.recipe)
        text = completion.text_with_reasoning() if thinking else completion.text
        reason = StopReason.END_TOKEN if completion.finished else StopReason.TURN_BUDGET
        # Stop strings are not sent: servers omit the string that matched from the text, and few report which one it was.
        # They count after the separate thinking.
        after, stops = len(text) - len(completion.text), self.rollout.stop_strings
        if ends := [start + len(stop) for stop in stops if (start := text.find(stop, after)) >= 0]:
            text, reason = text[: min(ends)], StopReason.STOP_STRING
        thoughts = "" if thinking else completion.reasoning
        transcript.answer(text, completion.tokens or 0, reason, thoughts, completion.calls)
        return transcript.action

    def _send(self, messages: Sequence[dict[str, Any]], seed: int, tools: Sequence[dict[str, Any]]) -> ChatCompletion:
        engine, sampling, max_tokens = self.engine, self.sampling, self.rollout.tokens_per_turn
        removed = {name for name, value in engine.extra_body.items() if value is None}
        extra = {name: value for name, value in engine.extra_body.items() if value is not None}
        if tools:
            extra["tools"] = list(tools)
        if sampling.top_p < 1:
            extra["top_p"] = sampling.top_p
        if "max_tokens" in removed:
            extra["max_completion_tokens"] = max_tokens
        return complete(
            "model",
            self.client,
            engine.model,
            messages,
            temperature=None if "temperature" in removed else sampling.temperature,
            max_tokens=None if "max_tokens" in removed else max_tokens,
            seed=seed if engine.sends_seed and sampling.temperature > 0 else None,
            extra=extra,
        )
