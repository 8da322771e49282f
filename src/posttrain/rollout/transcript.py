"""The transcript of an episode while it is played: its messages, and its tokens as streams."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain.data.rendering import Message, Renderer, Tool
from posttrain.data.tools import parse_hermes
from posttrain.environments.protocol import Action
from posttrain.episode import StopReason, Stream, Turn


class Transcript:
    """The record of one episode that an episode worker builds."""

    def __init__(self, messages: Sequence[Message], state: str | None = None, tools: Sequence[Tool] = ()) -> None:
        self.messages: list[Message] = list(messages)
        """The conversation as text, answers included."""
        self.turns: list[Turn] = []
        self.tools = tools
        self.action: Action = ""
        """The last answer in the form that the environment expects: with its calls parsed if there are tools."""
        self._state = state
        self._first = 0
        """Index in `messages` of the first message of the current context."""
        self._shown: list[Message] = list(messages)
        """`messages` in the form that the model expects: calls in `tool_calls`."""

    def reward(self, reward: float, info: dict[str, Any]) -> None:
        """Set the reward and the `info` of the last turn, with the numbers of its tool calls and of malformed ones."""
        turn = self.turns[-1]
        turn.reward = reward
        if not isinstance(self.action, str):
            turn.info = turn.info | {"tool_calls": len(self.action.calls), "malformed_calls": len(self.action.errors)}
        turn.info = turn.info | info

    def observe(self, messages: Sequence[Message], state: str | None = None, new_conversation: bool = False) -> None:
        """Append the environment's next messages. The other arguments are those of `Step`."""
        self._state = state
        if new_conversation:
            self._first = len(self.messages)
        self.messages.extend(messages)
        self._shown.extend(messages)

    def streams(self) -> list[Stream]:
        """The token streams; empty if the token ids are unknown."""
        return []


class TokenTranscript(Transcript):
    """Builds the token streams of an episode turn by turn. Tokens are only ever appended.

    If the chat template would rewrite earlier turns, the next turn starts a new stream whose prompt is the rewritten
    history.
    """

    def __init__(
        self,
        renderer: Renderer,
        messages: Sequence[Message],
        primer: str = "",
        state: str | None = None,
        tools: Sequence[Tool] = (),
    ) -> None:
        super().__init__(messages, state, tools)
        self.renderer = renderer
        self.primer = primer
        self._thought = False
        """Whether an answer of the current stream contains thinking."""
        self._streams = [StreamBuilder()]
        self._streams[0].append(renderer.prompt(self.messages, primer, tools))

    @property
    def context(self) -> list[int]:
        """Token ids that the next answer continues."""
        return self._streams[-1].ids

    def answer(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        stop_reason: StopReason,
        versions: Sequence[int] | None = None,
        experts: np.ndarray | None = None,
    ) -> str:
        """Append the policy's answer as a turn; returns its text, which starts with the primer.

        `ids`, `logprobs` (nats) and `versions` (of the weights) have one entry per sampled token. `versions` None means
        that no policy of the run sampled the tokens. `experts`: `Completion.experts`. `action` is the answer for the
        environment.
        """
        stream = self._streams[-1]
        text = self.primer + self.renderer.answer_text(ids)
        start = len(stream.ids)
        stream.append(ids, logprobs, len(self.turns), versions)
        stream.experts = stream.experts if experts is None else experts
        self.turns.append(
            Turn(len(self._streams) - 1, start, len(stream.ids), 0.0, stop_reason, text, state=self._state)
        )
        self.messages.append({"role": "assistant", "content": text})
        self._shown.append(self.messages[-1])
        self.action = text
        if self.tools:
            self.action = parsed = self.renderer.parse(text, self.tools)
            self._shown[-1] = self.renderer.call_message(text, parsed, len(self.turns) - 1)
        self._thought = self._thought or "</think>" in text
        return text

    def written(self, text: str) -> list[int]:
        """The tokens of an answer that no model sampled, with its end token. Calls in Hermes syntax are converted to
        the syntax of the chat template."""
        if self.tools and not self.primer:
            parsed = parse_hermes(text)
            message = self.renderer.call_message(text, parsed, len(self.turns))
            return self.renderer.message_ids(self._shown[self._first :], message, self.primer, self.tools)
        return self.renderer.answer(text.removeprefix(self.primer), self.primer or None)

    def reward(self, reward: float, info: dict) -> None:
        """Set the reward and the `info` of the last turn. The reward is placed on the turn's last sampled token."""
        super().reward(reward, info)
        turn = self.turns[-1]
        self._streams[turn.stream].rewards[turn.stop - 1] += reward

    def observe(self, messages: Sequence[Message], state: str | None = None, new_conversation: bool = False) -> None:
        """Append the environment's next messages and the start of the next answer.

        `state` names the state in which that answer is given. `new_conversation` starts a new conversation in a new
        stream.
        """
        super().observe(messages, state, new_conversation)
        roles = {"tool" if message["role"] == "tool" else "user" for message in messages} or {"user"}
        # Chat templates keep earlier thinking before the result of a call, but may remove it before a new question.
        thought = {"tool": "</think>" in self.turns[-1].answer, "user": self._thought}
        rewritten = [self.renderer.must_split(thought[role], role, bool(self.tools)) for role in sorted(roles)]
        if new_conversation or any(rewritten):
            self._thought = False
            self._streams.append(StreamBuilder())
            prompt = self.renderer.prompt(self._shown[self._first :], self.primer, self.tools)
            self._streams[-1].append(prompt)
        else:
            end = self.context[-1] if self.turns[-1].stop_reason is StopReason.END_TOKEN else None
            self._streams[-1].append(self.renderer.continuation(messages, end, self.primer, self.tools))

    def streams(self) -> list[Stream]:
        """The streams up to their last sampled token. Streams without sampled tokens are left out."""
        return [stream.build() for stream in self._streams if max(stream.turn, default=-1) >= 0]


class StreamBuilder:
    """A stream under construction."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.rewards: list[float] = []
        self.turn: list[int] = []
        self.versions: list[int] = []
        self.experts: np.ndarray | None = None
        """`Completion.experts` of the last turn, which has those of the turns before it as well."""

    def append(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float] | None = None,
        turn: int = -1,
        versions: Sequence[int] | None = None,
    ) -> None:
        self.ids.extend(ids)
        self.logprobs.extend(logprobs if logprobs is not None else [0.0] * len(ids))
        self.rewards.extend([0.0] * len(ids))
        self.turn.extend([turn] * len(ids))
        self.versions.extend(versions if versions is not None else [-1] * len(ids))

    def build(self) -> Stream:
        turn = np.array(self.turn, dtype=np.int32)
        length = int(np.flatnonzero(turn >= 0)[-1]) + 1
        turn = turn[:length]
        experts = self.experts
        if experts is not None:
            known = experts[:length]
            experts = np.pad(known, ((0, length - len(known)), (0, 0), (0, 0)), constant_values=-1)
        return Stream(
            ids=np.array(self.ids[:length], dtype=np.int64),
            sampled=turn >= 0,
            rollout_logprobs=np.array(self.logprobs[:length], dtype=np.float32),
            rewards=np.array(self.rewards[:length], dtype=np.float32),
            turn=turn,
            versions=np.array(self.versions[:length], dtype=np.int32),
            experts=experts,
        )
