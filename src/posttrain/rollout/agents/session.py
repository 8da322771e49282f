"""The calls of one agent as token streams.

A call's prompt is rendered once. Where its messages repeat an answer of this episode, that answer's sampled ids are
used, not its text. A prompt whose tokens begin with all tokens of a stream continues this stream; any other prompt
starts a new stream.
"""

import asyncio
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from posttrain.data.rendering import Message, Renderer
from posttrain.data.tools import call_id
from posttrain.engines.protocol import Completion, Engine, Request
from posttrain.episode import StopReason, Stream, Turn
from posttrain.recipe.rollout import RolloutRecipe, SamplingRecipe
from posttrain.rollout.driver import EpisodeRequest
from posttrain.rollout.transcript import StreamBuilder
from posttrain.seeds import derive_seed
from posttrain.serving.formats import CallRefused, ChatAnswer, ChatCall, digest, shown_text

_ANSWER = "POSTTRAIN-ANSWER"


@dataclass(frozen=True)
class _Recorded:
    """An earlier call: its prompt as text, its answer, and all tokens of both."""

    prompt: str
    answer: str
    ids: list[int]
    ended: bool


class AgentSession:
    """One attempt of an agent at a task. `complete` answers its calls; `finish` ends it."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        rollout: RolloutRecipe,
        sampling: SamplingRecipe,
        request: EpisodeRequest,
        attempt: int,
        lockstep: bool,
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.rollout = rollout
        self.sampling = sampling
        self.request = request
        self.attempt = attempt
        self.lockstep = lockstep
        self.loop = asyncio.get_running_loop()
        self.turns: list[Turn] = []
        self.info: dict[str, Any] = dict.fromkeys(
            ("calls", "streams", "retried", "abandoned", "refused", "late", "malformed_calls"), 0
        )
        """Counts of what the agent did, as they are stored with the episode."""
        self.failed = asyncio.Event()
        """Set when the engine failed, which ends the run."""
        self.error: Exception | None = None
        self.ended = False
        # One call at a time: an open episode then never has two requests in the engine, which counts them.
        self._lock = asyncio.Lock()
        self._open: set[asyncio.Task[Any]] = set()
        self._builders: list[StreamBuilder] = []
        self._conversations: list[list[Message]] = []
        self._recorded: dict[str, list[_Recorded]] = defaultdict(list)
        self._replies: dict[str, ChatAnswer] = {}
        self._asked: Counter[bytes] = Counter()

    async def complete(self, call: ChatCall) -> ChatAnswer:
        """Answer a call. CallRefused if the episode has ended or the prompt fills the context."""
        if self.ended:
            self.info["late"] += 1
            raise CallRefused("the episode of this key has ended", 403, "permission_error")
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            async with self._lock:
                if call.retry and (reply := self._replies.get(call.digest)) is not None:
                    self.info["retried"] += 1
                    return reply
                return await self._sample(call)
        except CallRefused:
            self.info["refused"] += 1
            raise
        except asyncio.CancelledError:
            self.info["abandoned"] += 1
            raise
        except Exception as error:
            self.error = error
            self.failed.set()
            raise
        finally:
            self._open.discard(task)

    async def _sample(self, call: ChatCall) -> ChatAnswer:
        limit = self.rollout.tokens_per_episode
        long = self.renderer.surely_longer(call.messages, call.tools, limit)
        if not long:
            # The names of all prefixes of the conversation, one per message.
            names = accumulate(call.messages, lambda key, message: _next(key, message, call.tools), initial="")
            keys = list(names)[1:]
            text, prompt = self._prompt(call, keys)
        if long or len(prompt) >= limit:
            size = f"more than {limit}" if long else len(prompt)
            raise CallRefused(
                f"the prompt has {size} tokens, and rollout.tokens_per_episode is {limit}",
                kind="context_length_exceeded",
            )
        budget = min(self.rollout.tokens_per_turn, limit - len(prompt))
        name = hashlib.blake2b(json.dumps(prompt).encode(), digest_size=16).digest()
        # The seed name contains the prompt instead of the order of calls, so concurrency does not change random
        # numbers.
        seed = derive_seed(*self.request.rng_key, self.attempt, name.hex(), self._asked[name])
        stops = (*self.rollout.stop_strings, *call.options.stops)
        request = Request(tuple(prompt), self.sampling, seed, min(budget, call.options.limit or budget), stops)
        if self.lockstep:
            completion = await self.engine.generate(request)
        else:
            with self.engine.episode(self.request.group):
                completion = await self.engine.generate(request)
        self._asked[name] += 1
        return self._record(call, keys[-1] if keys else "", text, prompt, completion, stops)

    def _record(
        self, call: ChatCall, key: str, text: str, prompt: list[int], completion: Completion, stops: Sequence[str]
    ) -> ChatAnswer:
        """Append the answer to its stream, and record it for later prompts."""
        number = len(self.turns)
        # The longest stream all of whose tokens begin the prompt, else a new one.
        lengths = {i: len(b.ids) for i, b in enumerate(self._builders) if prompt[: len(b.ids)] == b.ids}
        stream = max(lengths, key=lambda index: lengths[index], default=len(self._builders))
        if stream == len(self._builders):
            self._builders.append(StreamBuilder())
            self._conversations.append([])
        builder, answer = self._builders[stream], self.renderer.answer_text(completion.ids)
        builder.append(prompt[len(builder.ids) :])
        start = len(builder.ids)
        builder.append(completion.ids, completion.logprobs, number, completion.versions)
        shown = shown_text(answer, completion.stop_reason, stops)
        parsed = self.renderer.parse(shown, call.tools) if call.tools else None
        calls = [(call_id(number, i), one) for i, one in enumerate(parsed.calls)] if parsed else []
        content = parsed.text if parsed else shown
        info: dict[str, Any] = {"call": number}
        if parsed and parsed.errors:
            info["rejected"] = "; ".join(parsed.errors)
            self.info["malformed_calls"] += len(parsed.errors)
        self.turns.append(Turn(stream, start, len(builder.ids), 0.0, completion.stop_reason, answer, info))
        message: Message = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [one.message(id) for id, one in calls]
        ended = completion.stop_reason is StopReason.END_TOKEN
        self._recorded[_next(key, message, call.tools)].append(_Recorded(text, answer, list(builder.ids), ended))
        self._conversations[stream] = [*call.messages, {"role": "assistant", "content": answer}]
        self.info |= {"calls": len(self.turns), "streams": len(self._builders)}
        reply = ChatAnswer(content, calls, completion.stop_reason, len(prompt), len(completion.ids))
        self._replies[call.digest] = reply
        return reply

    # -- prompts and streams ------------------------------------------------------------------------------------------

    def _prompt(self, call: ChatCall, keys: Sequence[str]) -> tuple[str, list[int]]:
        """The prompt as text and as tokens, with the sampled ids of the latest answer of this episode that it
        continues."""
        messages = [
            {"role": "assistant", "content": self._recorded[key][-1].answer} if key in self._recorded else message
            for message, key in zip(call.messages, keys, strict=True)
        ]
        text = self.renderer.text(messages, call.tools)
        for place in reversed(range(len(messages))):
            for recorded in reversed(self._recorded.get(keys[place], [])):
                after = self._after(recorded, messages, place, text, call.tools)
                if after is not None:
                    end = recorded.ids[-1] if recorded.ended else None
                    return text, [*recorded.ids, *self.renderer.after_answer(after, end)]
        return text, self.renderer.encode(text)

    def _after(
        self, recorded: _Recorded, messages: list[Message], place: int, text: str, tools: list[dict[str, Any]]
    ) -> str | None:
        """The rendered text after the answer at `place`; None if the template rewrites the prompt, the answer or its
        end."""
        before = recorded.prompt + self.renderer.marked(recorded.answer)
        if text.startswith(before):
            after = text[len(before) :]
            return after if not recorded.ended or self.renderer.closes(after) else None
        if "</think>" in recorded.answer:
            return None
        # The template may trim an answer; its sampled ids are used regardless.
        marked = [*messages[:place], {"role": "assistant", "content": _ANSWER}, *messages[place + 1 :]]
        start, marker, after = self.renderer.text(marked, tools).partition(_ANSWER)
        kept = marker and start == recorded.prompt and (not recorded.ended or self.renderer.closes(after))
        return after if kept else None

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> tuple[list[Stream], list[Turn], list[Message]]:
        """End the session; returns the streams, the turns and the conversation of the last call.

        Calls in progress are cancelled.

        Streams are ordered by their last call, and turns by stream, so that the last sampled token of the episode,
        which gets the reward, belongs to its last call.
        """
        self.ended = True
        for task in self._open:
            task.cancel()
        last = {turn.stream: number for number, turn in enumerate(self.turns)}
        order = {stream: place for place, stream in enumerate(sorted(last, key=lambda stream: last[stream]))}
        place_of = sorted(range(len(self.turns)), key=lambda n: (order[self.turns[n].stream], self.turns[n].start))
        renumbered = {old: new for new, old in enumerate(place_of)}
        streams = []
        for stream in order:
            builder = self._builders[stream]
            builder.turn = [renumbered.get(turn, -1) for turn in builder.turn]
            streams.append(builder.build())
        turns = [replace(self.turns[n], stream=order[self.turns[n].stream]) for n in place_of]
        messages = self._conversations[self.turns[-1].stream] if self.turns else []
        # The endpoint keeps an ended session to refuse and count late calls, without what it has recorded.
        self._builders, self._conversations, self.turns = [], [], []
        for record in (self._recorded, self._replies, self._asked):
            record.clear()
        return streams, turns, messages


def _next(key: str, message: Message, tools: list[dict[str, Any]]) -> str:
    """The name of the conversation `key` with another message: by the fields that clients keep."""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    calls = [[function["name"], function.get("arguments") or {}] for function in functions]
    return digest(key or tools, [message["role"], message.get("content") or "", calls])
