"""`posttrain serve`: an OpenAI-compatible server for one policy, on the loopback address.

Chat completions (with tools and streaming), completions and models. Log-probabilities are those of the sampled tokens,
at the request's temperature and before top-p, top-k and min-p, as the learner computes them.
"""

import asyncio
import inspect
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError, field_validator

from posttrain.credit.units.offsets import align
from posttrain.data.messages import UnusableRow, check_value
from posttrain.data.rendering import Renderer
from posttrain.data.tools import call_id
from posttrain.engines.protocol import Completion, Engine, Request
from posttrain.episode import CUT_OFF, StopReason
from posttrain.loopback import App, Guard, Refusal, Scope, header
from posttrain.recipe.compose import section
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.rollout.agents import formats
from posttrain.rollout.agents.session import CallRefused, ChatAnswer
from posttrain.seeds import derive_seed

_Scored = tuple[int, float | None, int | None, float | None]
"""A token with its log-probability, and the most probable token in its place with its own; None for the first token."""
_POSITIONS_PER_CHUNK = 1024
MAX_CHOICES = 1024
"""Largest number of answers to one request."""
_UNSUPPORTED = ("suffix", "best_of", "logit_bias", "presence_penalty", "frequency_penalty", "functions")
"""Unsupported fields that would change the answer. They are refused unless they are null, false or 0."""


class _Body(BaseModel):
    """Sampling fields of both kinds of request."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = Field(1, ge=1, le=64)
    seed: int | None = Field(None, ge=0)
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | int | None = None
    top_logprobs: int | None = Field(None, ge=0)
    stream: bool = False
    echo: bool = False
    stream_options: dict[str, Any] | None = None
    prompt: str | list[str] | list[int] | list[list[int]] | None = None
    model: str = Field("", max_length=1000)

    @field_validator("stop")
    @classmethod
    def _few(cls, value: str | list[str] | None) -> str | list[str] | None:
        if isinstance(value, list) and len(value) > 64:
            raise ValueError(f"has {len(value)} texts; it can have 64")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(filter(None, [self.stop] if isinstance(self.stop, str) else self.stop or []))

    def sampling(self) -> SamplingRecipe:
        """InputError for a value that is not allowed."""
        top_k = max(self.top_k, 0)  # other servers use -1 to disable it
        return section(SamplingRecipe, temperature=self.temperature, top_p=self.top_p, top_k=top_k, min_p=self.min_p)

    @property
    def wants_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


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

    @property
    def finish(self) -> str:
        return "length" if self.reason in CUT_OFF else "stop"


class Server:
    """Answers requests with one engine. The engine computes in the event loop of the HTTP server."""

    def __init__(self, engine: Engine, name: str, seed: int = 0, context: int | None = None) -> None:
        """`context`: maximum number of tokens of a prompt with its answer, at most the model's."""
        self.engine = engine
        self.name = name
        self.renderer = Renderer(engine.policy.tokenizer, engine.policy.end_tokens)
        limit = int(getattr(engine.policy.model.config, "max_position_embeddings", None) or 1 << 20)
        self.context = min(limit, context or limit)
        self._seed = seed
        self._count = 0
        self._streams = "on_token" in inspect.signature(engine.generate).parameters

    def app(self) -> App:
        """The application."""
        from fastapi import FastAPI
        from starlette.responses import JSONResponse

        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

        def route(path: str, whole: Callable[..., Any], stream: Callable[..., AsyncIterator[str]]) -> None:
            async def answer(request: Any, values: dict[str, Any]) -> dict[str, Any] | AsyncIterator[str]:
                body = _parse(values)
                if not body.stream:
                    return await formats.unless_gone(request, asyncio.ensure_future(whole(values, body)))
                # Compute the first event now, so that an error still gets its own HTTP status.
                events = stream(values, body)
                return _after(await anext(events), events)

            formats.add_route(app, path, answer, formats.openai_error)

        route("/v1/chat/completions", self._chat, self._chat_stream)
        route("/v1/completions", self._texts, self._text_stream)
        app.add_route("/v1/models", lambda request: JSONResponse(formats.openai_models(self.name)), methods=["GET"])
        return app

    # -- sampling
    # -------------------------------------------------------------------------------------------------------

    async def _complete(
        self,
        prompt: Sequence[int],
        body: _Body,
        limit: int | None,
        index: int,
        show: Callable[[int], None] | None = None,
    ) -> _Choice:
        """One completion of `prompt`. `show` is called with each token as it is sampled, if the engine supports it."""
        if body.seed is None:
            seed = derive_seed(self._seed, "serve", self._count)
            self._count += 1
        else:
            seed = derive_seed(body.seed, "served", index)
        room = self.context - len(prompt)
        request = Request(tuple(prompt), body.sampling(), seed, min(limit or room, room), body.stops)
        with self.engine.episode():
            if show is not None and self._streams:
                completion: Completion = await self.engine.generate(request, show)  # type: ignore[call-arg]
            else:
                completion = await self.engine.generate(request)
        return self._choice(completion, body.stops)

    def _choice(self, completion: Completion, stops: Sequence[str]) -> _Choice:
        kept = len(completion.ids) - (completion.stop_reason is StopReason.END_TOKEN)
        text = self.renderer.answer_text(completion.ids)
        if completion.stop_reason is StopReason.STOP_STRING:
            text = text[: min(text.find(stop) for stop in stops if stop in text)]
        return _Choice(
            completion.ids[:kept], completion.logprobs[:kept], text, completion.stop_reason, len(completion.ids)
        )

    async def _pieces(self, prompt: Sequence[int], body: _Body, limit: int | None) -> AsyncIterator[str | _Choice]:
        """The text of a completion in pieces, then the completion. Text that may be part of a stop string, or of what the
        template writes before the end token, is held back.
        """
        held = max([len(self.renderer.before_end), *(len(stop) - 1 for stop in body.stops)])
        tokens: asyncio.Queue[int | None] = asyncio.Queue()
        task = asyncio.create_task(self._complete(prompt, body, limit, 0, tokens.put_nowait))
        task.add_done_callback(lambda _: tokens.put_nowait(None))
        ids: list[int] = []
        shown = ""
        try:
            while (token := await tokens.get()) is not None:
                # When the client disconnects, anyio does not cancel a task that waits for a finished future. With a
                # token per pass of the
                # event loop, the future of the queue is always finished.
                await asyncio.sleep(0)
                ids.append(token)
                text = self.renderer.answer_text(ids)
                ready = text[: max(len(text) - held, 0)]
                # A character of several tokens is sent once it is complete.
                stopped = any(stop in text for stop in body.stops)
                if not stopped and ready.startswith(shown) and len(ready) > len(shown) and "\ufffd" not in ready[-1:]:
                    yield ready[len(shown) :]
                    shown = ready
            choice = await task
            if len(choice.text) > len(shown):
                yield choice.text[len(shown) :]
            yield choice
        finally:
            task.cancel()

    # -- chat completions
    # -----------------------------------------------------------------------------------------------

    def _prompt(self, values: dict[str, Any], body: _Body) -> tuple[list[int], bool]:
        """The prompt of a chat, and whether it has tools."""
        if body.top_logprobs:
            raise CallRefused("top_logprobs must be 0; the engine returns the log-probability of the sampled token")
        read = ("messages", "tools", "tool_choice", "response_format", "functions")
        call = formats.openai_call({key: values[key] for key in read if key in values}, False)
        if self.renderer.surely_longer(call.messages, call.tools, self.context):
            raise self._too_long(f"more than {self.context}")
        prompt = self.renderer.prompt(call.messages, tools=call.tools)
        self._require_room(prompt)
        return prompt, bool(call.tools)

    async def chat(self, values: dict[str, Any]) -> dict[str, Any]:
        """The answer to a chat completion without streaming, as in OpenAI's API. CallRefused for an unsupported
        request."""
        try:
            check_value(values, "it")
        except UnusableRow as error:
            raise CallRefused(f"the request cannot be used: {error}") from error
        return await self._chat(values, _parse(values))

    async def _chat(self, values: dict[str, Any], body: _Body) -> dict[str, Any]:
        prompt, tools = self._prompt(values, body)
        limit = body.max_completion_tokens or body.max_tokens
        choices = await _all(self._complete(prompt, body, limit, index) for index in range(body.n))
        answers = [self._answer(choice, tools, len(prompt)) for choice in choices]
        whole = self._head(values, "chatcmpl", "chat.completion")
        whole["choices"] = [
            formats.openai_answer(answer, values)["choices"][0]
            | {"index": index, "logprobs": self._chat_logprobs(choice) if body.logprobs else None}
            for index, (answer, choice) in enumerate(zip(answers, choices, strict=True))
        ]
        return whole | {"usage": _usage(len(prompt), choices)}

    async def _chat_stream(self, values: dict[str, Any], body: _Body) -> AsyncIterator[str]:
        _require_one(body)
        prompt, tools = self._prompt(values, body)
        head = self._head(values, "chatcmpl", "chat.completion.chunk")

        def chunk(delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
            return _event(head | {"choices": [choice]})

        yield chunk({"role": "assistant", "content": ""})
        async for piece in self._pieces(prompt, body, body.max_completion_tokens or body.max_tokens):
            # With tools, text and calls can be distinguished only at the end.
            if isinstance(piece, str):
                if not tools:
                    yield chunk({"content": piece})
                continue
            answer = self._answer(piece, tools, len(prompt))
            whole = formats.openai_answer(answer, values)["choices"][0]
            if tools:
                message = whole["message"]
                calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", []))]
                yield chunk({"content": message["content"], **({"tool_calls": calls} if calls else {})})
            logprobs = self._chat_logprobs(piece) if body.logprobs else None
            yield chunk({}, whole["finish_reason"], logprobs)
            if body.wants_usage:
                yield _event(head | {"choices": [], "usage": _usage(len(prompt), [piece])})
        yield "data: [DONE]\n\n"

    def _answer(self, choice: _Choice, tools: bool, prompt_tokens: int) -> ChatAnswer:
        parsed = self.renderer.parse(choice.text) if tools else None
        calls = [(call_id(0, number), call) for number, call in enumerate(parsed.calls)] if parsed else []
        text = parsed.text if parsed else choice.text
        return ChatAnswer(0, text, calls, choice.reason, None, prompt_tokens, choice.sampled)

    def _chat_logprobs(self, choice: _Choice) -> dict[str, Any]:
        tokens = [self.renderer.answer_text([id]) for id in choice.ids]
        return {
            "content": [
                {
                    "token": token,
                    "logprob": logprob,
                    # A partial character is not text.
                    "bytes": None if "\ufffd" in token else list(token.encode()),
                    "top_logprobs": [],
                }
                for token, logprob in zip(tokens, choice.logprobs, strict=True)
            ]
        }

    # -- completions
    # ----------------------------------------------------------------------------------------------------

    def _prompts(self, body: _Body) -> list[list[int]]:
        """The prompts as tokens. A text gets the tokenizer's special tokens, as in other servers."""
        if body.prompt is None or body.prompt == []:
            raise CallRefused("prompt is missing")
        if isinstance(body.logprobs, int) and body.logprobs > 1:
            raise CallRefused("logprobs must be at most 1; the engine returns the log-probability of the sampled token")
        tokenizer = self.engine.policy.tokenizer
        prompts = [body.prompt] if isinstance(body.prompt, str) or isinstance(body.prompt[0], int) else body.prompt
        if len(prompts) * body.n > MAX_CHOICES:
            raise CallRefused(f"the request asks for {len(prompts) * body.n} answers; ask for at most {MAX_CHOICES}")
        for one in prompts:
            if isinstance(one, str) and self.renderer.surely_longer([{"content": one}], [], self.context):
                raise self._too_long(f"more than {self.context}")
        found = [list(tokenizer(one)["input_ids"]) if isinstance(one, str) else list(one) for one in prompts]
        if bad := [id for ids in found for id in ids if not 0 <= id < len(tokenizer)]:
            raise CallRefused(f"the prompt has token {bad[0]}, and the model has {len(tokenizer)} tokens")
        for ids in found:
            self._require_room(ids)
        return found

    def _require_room(self, prompt: Sequence[int]) -> None:
        if not 0 < len(prompt) < self.context:
            raise self._too_long(str(len(prompt)))

    def _too_long(self, tokens: str) -> CallRefused:
        limits = f"at least 1 and fewer than the model's {self.context}"
        return CallRefused(f"the prompt has {tokens} tokens; it must have {limits}", kind="context_length_exceeded")

    async def _texts(self, values: dict[str, Any], body: _Body) -> dict[str, Any]:
        prompts = self._prompts(body)
        limit = body.max_tokens or 16
        choices = await _all(self._complete(ids, body, limit, index) for ids in prompts for index in range(body.n))
        scored = self._scored(prompts) if body.echo else None
        whole = self._head(values, "cmpl", "text_completion")
        whole["choices"] = [
            self._text_choice(choice, index, body, None if scored is None else scored[index // body.n])
            for index, choice in enumerate(choices)
        ]
        return whole | {"usage": _usage(sum(map(len, prompts)), choices)}

    async def _text_stream(self, values: dict[str, Any], body: _Body) -> AsyncIterator[str]:
        _require_one(body)
        if body.echo:
            raise CallRefused("echo is not supported with stream; leave out one of them")
        prompts = self._prompts(body)
        if len(prompts) > 1:
            raise CallRefused("stream takes one prompt; send several requests")
        head = self._head(values, "cmpl", "text_completion")
        async for piece in self._pieces(prompts[0], body, body.max_tokens or 16):
            if isinstance(piece, str):
                choice = {"index": 0, "text": piece, "finish_reason": None, "logprobs": None}
                yield _event(head | {"choices": [choice]})
                continue
            yield _event(head | {"choices": [self._text_choice(piece, 0, body) | {"text": ""}]})
            if body.wants_usage:
                yield _event(head | {"choices": [], "usage": _usage(len(prompts[0]), [piece])})
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
        self, choice: _Choice, index: int, body: _Body, prompt: Sequence[_Scored] | None = None
    ) -> dict[str, Any]:
        """`prompt`: the tokens of the prompt, which precede the answer with `echo`."""
        rows: list[_Scored] = [
            *(prompt or ()),
            *((id, value, id, value) for id, value in zip(choice.ids, choice.logprobs, strict=True)),
        ]
        logprobs = None
        if body.logprobs is not None and body.logprobs is not False:
            ids = [id for id, _, _, _ in rows]
            aligned = align(ids, self.renderer.answer_text)
            logprobs = {
                "tokens": [aligned.slice(place, place + 1) for place in range(len(ids))],
                "token_logprobs": [value for _, value, _, _ in rows],
                "text_offset": aligned.offsets[:-1].tolist(),
                "top_logprobs": [
                    None if best is None else {self.renderer.answer_text([best]): most} for _, _, best, most in rows
                ]
                if body.logprobs
                else None,
            }
        text = self.renderer.answer_text([id for id, _, _, _ in prompt or ()]) + choice.text
        return {"index": index, "text": text, "finish_reason": choice.finish, "logprobs": logprobs}

    def _head(self, values: dict[str, Any], prefix: str, kind: str) -> dict[str, Any]:
        self._count += 1
        model = values.get("model") or self.name
        return {"id": f"{prefix}-{self._count}", "object": kind, "created": int(time.time()), "model": model}


def guarded(app: App, port: int, key: str | None) -> Guard:
    """`app`, restricted to programs of this machine that send `key` (if set)."""

    def check(scope: Scope) -> Refusal | None:
        if key is not None and header(scope, b"authorization") != [f"Bearer {key}".encode()]:
            return 401, "wrong API key; use the one that `posttrain serve` was started with"
        return None

    return Guard(app, port, check, formats.openai_refusal)


def _parse(values: dict[str, Any]) -> _Body:
    """The sampling fields of a request. CallRefused for unsupported values."""
    if given := [key for key in _UNSUPPORTED if values.get(key)]:
        raise CallRefused(f"{given[0]} is not supported; leave it out")
    try:
        body = _Body.model_validate({key: values[key] for key in _Body.model_fields if values.get(key) is not None})
        body.sampling()
        return body
    except ValidationError as error:
        first = error.errors()[0]
        raise CallRefused(f"{first['loc'][0] if first['loc'] else 'the request'}: {first['msg']}") from error


async def _all(coroutines: Any) -> list[_Choice]:
    """Several completions at once; all are cancelled if one fails, whose error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _after(first: str, events: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for event in events:
        yield event


def _require_one(body: _Body) -> None:
    if body.n > 1:
        raise CallRefused("n must be 1 in a stream; send several requests")


def _usage(prompt_tokens: int, choices: Sequence[_Choice]) -> dict[str, int]:
    sampled = sum(choice.sampled for choice in choices)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": prompt_tokens + sampled}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
