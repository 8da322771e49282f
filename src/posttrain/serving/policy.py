"""`posttrain serve`: the answers of one policy to OpenAI clients, on the loopback address.

Chat completions (with tools and streaming), completions and models. Log-probabilities are those of the sampled tokens,
at the request's temperature and before top-p, top-k and min-p, as the learner computes them.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from posttrain.credit.units.offsets import align
from posttrain.data.rendering import Renderer
from posttrain.data.tools import call_id
from posttrain.engines.protocol import Completion, Engine, Request
from posttrain.episode import CUT_OFF, StopReason
from posttrain.models.forward import transformer
from posttrain.seeds import derive_seed
from posttrain.serving.formats import (
    CallRefused,
    ChatAnswer,
    ChatCall,
    Options,
    event,
    openai_head,
    openai_usage,
    shown_text,
)
from posttrain.serving.server import add_route, application, unless_gone

_Scored = tuple[int, float | None, int | None, float | None]
"""A token with its log-probability, and the most probable token in its place with its own; None for the first token."""
_POSITIONS_PER_CHUNK = 1024
MAX_CHOICES = 1024
"""Largest number of answers to one request."""


@dataclass(frozen=True)
class _Choice:
    """A finished completion as text."""

    ids: tuple[int, ...]
    """Without the end token."""
    logprobs: tuple[float, ...]
    text: str
    """Without the stop string."""
    reason: StopReason
    sampled: int
    """Number of sampled tokens, with the end token."""


class PolicyServer:
    """Answers requests with one engine. The engine computes in the event loop of the HTTP server."""

    def __init__(self, engine: Engine, name: str, seed: int = 0, context: int | None = None) -> None:
        """`context`: maximum number of tokens of a prompt with its answer, at most the model's."""
        self.engine = engine
        self.name = name
        self.renderer = Renderer(engine.policy.tokenizer, engine.policy.end_tokens)
        config = transformer(engine.policy.model).config.get_text_config()
        limit = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
        self.context = min(limit, context or limit)
        self._seed = seed
        self._count = 0
        self._streams = "on_token" in inspect.signature(engine.generate).parameters

    def app(self) -> Any:
        """The application."""
        app = application(self)

        async def texts(request: Any, values: dict[str, Any]) -> dict[str, Any] | AsyncIterator[str]:
            options = Options.read(values)
            _check(options)
            if options.stream:
                return self._text_stream(options)
            return await unless_gone(request, asyncio.ensure_future(self._texts(options)))

        add_route(app, "/v1/completions", texts)
        return app

    # -- sampling -----------------------------------------------------------------------------------------------------

    async def _complete(
        self,
        prompt: Sequence[int],
        options: Options,
        limit: int | None,
        index: int,
        show: Callable[[int], None] | None = None,
    ) -> _Choice:
        """One completion of `prompt`. `show` is called with each token as it is sampled, if the engine supports it."""
        if options.seed is None:
            seed = derive_seed(self._seed, "serve", self._count)
            self._count += 1
        else:
            seed = derive_seed(options.seed, "served", index)
        room = self.context - len(prompt)
        request = Request(tuple(prompt), options.sampling(), seed, min(limit or room, room), options.stops)
        with self.engine.episode():
            if show is not None and self._streams:
                completion: Completion = await self.engine.generate(request, show)  # type: ignore[call-arg]
            else:
                completion = await self.engine.generate(request)
        ids, reason = completion.ids, completion.stop_reason
        kept = len(ids) - (reason is StopReason.END_TOKEN)
        text = shown_text(self.renderer.answer_text(ids), reason, options.stops)
        return _Choice(ids[:kept], completion.logprobs[:kept], text, reason, len(ids))

    async def _pieces(self, prompt: Sequence[int], options: Options, limit: int | None) -> AsyncIterator[str | _Choice]:
        """The text of a completion in pieces, then the completion. Text that may be part of a stop string, or of what the
        template writes before the end token, is held back.
        """
        held = max([len(self.renderer.before_end), *(len(stop) - 1 for stop in options.stops)])
        tokens: asyncio.Queue[int | None] = asyncio.Queue()
        task = asyncio.create_task(self._complete(prompt, options, limit, 0, tokens.put_nowait))
        task.add_done_callback(lambda _: tokens.put_nowait(None))
        ids: list[int] = []
        shown = ""
        try:
            while (token := await tokens.get()) is not None:
                # When the client disconnects, anyio does not cancel a task that waits for a finished future. With a
                # token per pass of the event loop, the future of the queue is always finished.
                await asyncio.sleep(0)
                ids.append(token)
                text = self.renderer.answer_text(ids)
                ready = text[: max(len(text) - held, 0)]
                # A character of several tokens is sent once it is complete.
                stopped = any(stop in text for stop in options.stops)
                if not stopped and ready.startswith(shown) and len(ready) > len(shown) and "\ufffd" not in ready[-1:]:
                    yield ready[len(shown) :]
                    shown = ready
            choice = await task
            if len(choice.text) > len(shown):
                yield choice.text[len(shown) :]
            yield choice
        finally:
            task.cancel()

    # -- chats --------------------------------------------------------------------------------------------------------

    async def answers(self, call: ChatCall, request: Any) -> list[ChatAnswer]:
        """As `ChatBackend.answers`."""
        prompt, options = self._prompt(call), call.options
        completions = (self._complete(prompt, options, options.limit, index) for index in range(options.n))
        choices = await unless_gone(request, asyncio.ensure_future(_all(completions)))
        return [self._answer(choice, call, len(prompt)) for choice in choices]

    async def stream(self, call: ChatCall, request: Any) -> tuple[int, AsyncIterator[str | ChatAnswer]]:
        """As `ChatBackend.stream`."""
        prompt = self._prompt(call)

        async def parts() -> AsyncIterator[str | ChatAnswer]:
            async for part in self._pieces(prompt, call.options, call.options.limit):
                if isinstance(part, _Choice):
                    yield self._answer(part, call, len(prompt))
                elif not call.tools:  # otherwise, text and calls can be distinguished only at the end
                    yield part

        return len(prompt), parts()

    def _prompt(self, call: ChatCall) -> list[int]:
        _check(call.options)
        if call.options.top_logprobs:
            raise CallRefused("top_logprobs must be 0; the engine returns the log-probability of the sampled token")
        if self.renderer.surely_longer(call.messages, call.tools, self.context):
            self._require_room(None)
        prompt = self.renderer.prompt(call.messages, tools=call.tools)
        self._require_room(prompt)
        return prompt

    def _answer(self, choice: _Choice, call: ChatCall, prompt_tokens: int) -> ChatAnswer:
        parsed = self.renderer.parse(choice.text, call.tools) if call.tools else None
        calls = [(call_id(0, number), one) for number, one in enumerate(parsed.calls)] if parsed else []
        text = parsed.text if parsed else choice.text
        logprobs = None
        if call.options.logprobs:
            tokens = [self.renderer.answer_text([id]) for id in choice.ids]
            logprobs = [
                # A partial character is not text.
                {"token": token, "logprob": value, "bytes": None if "\ufffd" in token else list(token.encode())}
                | {"top_logprobs": []}
                for token, value in zip(tokens, choice.logprobs, strict=True)
            ]
        return ChatAnswer(text, calls, choice.reason, prompt_tokens, choice.sampled, logprobs)

    # -- completions --------------------------------------------------------------------------------------------------

    def _prompts(self, options: Options) -> list[list[int]]:
        """The prompts as tokens. A text gets the tokenizer's special tokens, as in other servers."""
        if options.prompt is None or options.prompt == []:
            raise CallRefused("prompt is missing")
        if isinstance(options.logprobs, int) and options.logprobs > 1:
            raise CallRefused("logprobs must be at most 1; the engine returns the log-probability of the sampled token")
        tokenizer = self.engine.policy.tokenizer
        given = options.prompt
        prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        if (count := len(prompts) * options.n) > MAX_CHOICES:
            raise CallRefused(f"the request asks for {count} answers; ask for at most {MAX_CHOICES}")
        for one in prompts:
            if isinstance(one, str) and self.renderer.surely_longer([{"content": one}], [], self.context):
                self._require_room(None)
        encoded = [list(tokenizer(one)["input_ids"]) if isinstance(one, str) else list(one) for one in prompts]
        if bad := [id for ids in encoded for id in ids if not 0 <= id < len(tokenizer)]:
            raise CallRefused(f"the prompt has token {bad[0]}, and the model has {len(tokenizer)} tokens")
        for ids in encoded:
            self._require_room(ids)
        return encoded

    def _require_room(self, prompt: Sequence[int] | None) -> None:
        """CallRefused unless the prompt leaves room for an answer; None: a prompt that surely does not."""
        if prompt is None or not 0 < len(prompt) < self.context:
            tokens = f"more than {self.context}" if prompt is None else len(prompt)
            raise CallRefused(
                f"the prompt has {tokens} tokens; it must have at least 1 and fewer than the model's {self.context}",
                kind="context_length_exceeded",
            )

    async def _texts(self, options: Options) -> dict[str, Any]:
        prompts = self._prompts(options)
        limit = options.max_tokens or 16
        choices = await _all(
            self._complete(ids, options, limit, index) for ids in prompts for index in range(options.n)
        )
        scored = self._scored(prompts) if options.echo else None
        shown = [
            self._text_choice(choice, index, options, None if scored is None else scored[index // options.n])
            for index, choice in enumerate(choices)
        ]
        usage = openai_usage(sum(map(len, prompts)), sum(choice.sampled for choice in choices))
        return self._head(options) | {"choices": shown, "usage": usage}

    async def _text_stream(self, options: Options) -> AsyncIterator[str]:
        if options.echo:
            raise CallRefused("echo is not supported with stream; leave out one of them")
        prompts = self._prompts(options)
        if len(prompts) > 1:
            raise CallRefused("stream takes one prompt; send several requests")
        head = self._head(options)
        async for piece in self._pieces(prompts[0], options, options.max_tokens or 16):
            if isinstance(piece, str):
                choice = {"index": 0, "text": piece, "finish_reason": None, "logprobs": None}
                yield event(head | {"choices": [choice]})
                continue
            yield event(head | {"choices": [self._text_choice(piece, 0, options) | {"text": ""}]})
            if options.wants_usage:
                yield event(head | {"choices": [], "usage": openai_usage(len(prompts[0]), piece.sampled)})
        yield "data: [DONE]\n\n"

    def _scored(self, prompts: Sequence[Sequence[int]]) -> list[list[_Scored]]:
        """The tokens of each prompt, scored by the forward pass of training at temperature 1."""
        best: list[torch.Tensor] = []

        def most_probable(logprobs: torch.Tensor, _: slice) -> torch.Tensor:
            top = logprobs.max(-1)
            best.append(top.indices)
            return top.values

        scored = []
        for ids in prompts:
            best.clear()
            chosen = np.arange(len(ids)) > 0
            with torch.no_grad():
                scores = self.engine.policy.score(
                    [np.array(ids)], [chosen], 1.0, _POSITIONS_PER_CHUNK, measure=most_probable
                )
            assert scores.measured is not None
            parts = (scores.logprobs, torch.cat(best), scores.measured) if len(ids) > 1 else ()
            rows = zip(ids[1:], *(part.tolist() for part in parts), strict=bool(parts))
            scored.append([(ids[0], None, None, None), *rows])
        return scored

    def _text_choice(
        self, choice: _Choice, index: int, options: Options, prompt: Sequence[_Scored] | None = None
    ) -> dict[str, Any]:
        """`prompt`: the tokens of the prompt, which precede the answer with `echo`."""
        rows: list[_Scored] = [
            *(prompt or ()),
            *((id, value, id, value) for id, value in zip(choice.ids, choice.logprobs, strict=True)),
        ]
        logprobs = None
        if options.logprobs is not None and options.logprobs is not False:
            ids = [id for id, _, _, _ in rows]
            aligned = align(ids, self.renderer.answer_text)
            logprobs = {
                "tokens": [aligned.slice(place, place + 1) for place in range(len(ids))],
                "token_logprobs": [value for _, value, _, _ in rows],
                "text_offset": aligned.offsets[:-1].tolist(),
                "top_logprobs": [
                    None if best is None else {self.renderer.answer_text([best]): most} for _, _, best, most in rows
                ]
                if options.logprobs
                else None,
            }
        text = self.renderer.answer_text([id for id, _, _, _ in prompt or ()]) + choice.text
        finish = "length" if choice.reason in CUT_OFF else "stop"
        return {"index": index, "text": text, "finish_reason": finish, "logprobs": logprobs}

    def _head(self, options: Options) -> dict[str, Any]:
        self._count += 1
        return openai_head(f"cmpl-{self._count}", "text_completion", options.model or self.name)


def _check(options: Options) -> None:
    """CallRefused or InputError for options that are not supported or not allowed."""
    if options.unsupported:
        raise CallRefused(f"{options.unsupported} is not supported; leave it out")
    if options.stream and options.n > 1:
        raise CallRefused("n must be 1 in a stream; send several requests")
    options.sampling()


async def _all(coroutines: Any) -> list[_Choice]:
    """Several completions at once; all are cancelled if one fails, whose error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
