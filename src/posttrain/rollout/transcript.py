"""The bookkeeping of one episode's tokens: which were sampled, with what log-probability, in which turn."""

from collections.abc import Sequence

import numpy as np

from posttrain.data.rendering import Message, Renderer
from posttrain.episode import StopReason, Stream, Turn


class TokenTranscript:
    """Grows the streams of an episode turn by turn. Tokens are only ever appended.

    Where the chat template would rewrite the history that an answer becomes, the next turn starts a new stream whose
    prompt is the rewritten history.
    """

    def __init__(
        self, renderer: Renderer, messages: Sequence[Message], primer: str = "", state: str | None = None
    ) -> None:
        self.renderer = renderer
        self.primer = primer
        self.messages: list[Message] = list(messages)
        self.turns: list[Turn] = []
        self._state = state
        self._first = 0
        """Where in `messages` the conversation that the policy sees begins."""
        self._streams = [_Growing()]
        self._streams[0].append(renderer.prompt(self.messages, primer))

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
    ) -> str:
        """Append the policy's answer; returns it as text, the primer in front. `versions`: of the weights that sampled
        each token, None where none of a run did."""
        stream = self._streams[-1]
        text = self.primer + self.renderer.answer_text(ids)
        start = len(stream.ids)
        stream.append(ids, logprobs, len(self.turns), versions)
        self.turns.append(
            Turn(len(self._streams) - 1, start, len(stream.ids), 0.0, stop_reason, text, state=self._state)
        )
        self.messages.append({"role": "assistant", "content": text})
        return text

    def reward(self, reward: float, info: dict) -> None:
        """Pay the last turn: the reward sits on its last sampled token."""
        turn = self.turns[-1]
        turn.reward = reward
        turn.info = info
        self._streams[turn.stream].rewards[turn.stop - 1] += reward

    def observe(self, messages: Sequence[Message], state: str | None = None, new_conversation: bool = False) -> None:
        """Append what the environment says next and the start of the policy's next answer, given in `state`.

        `new_conversation`: the messages start a conversation and a stream of their own.
        """
        self._state = state
        answer = self.messages[-1]["content"]
        if new_conversation:
            self._first = len(self.messages)
        self.messages.extend(messages)
        if new_conversation or self.renderer.must_split(answer):
            self._streams.append(_Growing())
            self._streams[-1].append(self.renderer.prompt(self.messages[self._first :], self.primer))
        else:
            ended = self.turns[-1].stop_reason is StopReason.END_TOKEN
            self._streams[-1].append(self.renderer.continuation(messages, ended, self.primer))

    def streams(self) -> list[Stream]:
        """The streams, without trailing tokens that nobody answered to."""
        return [stream.finished() for stream in self._streams if any(turn >= 0 for turn in stream.turn)]


class _Growing:
    """A stream under construction."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.rewards: list[float] = []
        self.turn: list[int] = []
        self.versions: list[int] = []

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

    def finished(self) -> Stream:
        length = max(i for i, turn in enumerate(self.turn) if turn >= 0) + 1
        turn = np.array(self.turn[:length], dtype=np.int32)
        return Stream(
            ids=np.array(self.ids[:length], dtype=np.int64),
            sampled=turn >= 0,
            rollout_logprobs=np.array(self.logprobs[:length], dtype=np.float32),
            rewards=np.array(self.rewards[:length], dtype=np.float32),
            turn=turn,
            versions=np.array(self.versions[:length], dtype=np.int32),
        )
