"""The wire format: chat completions of OpenAI, read as a `ChatCall` and written as an answer, its events or an error."""

import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, Field, ValidationError, field_validator

from posttrain.data.messages import UnusableRow, messages_of, without_training_keys
from posttrain.data.rendering import Message
from posttrain.data.tools import ToolCall
from posttrain.episode import CUT_OFF, StopReason
from posttrain.recipe.compose import section
from posttrain.recipe.rollout import SamplingRecipe


class CallRefused(Exception):
    """Raised for a call that is refused. `status` is the HTTP status and `kind` the machine-readable reason."""

    def __init__(self, message: str, status: int = 400, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


_UNSUPPORTED = ("suffix", "best_of", "logit_bias", "presence_penalty", "frequency_penalty")
"""Unsupported fields that would change the answer, unless they are null, false or 0."""


class Options(BaseModel):
    """The fields of a request besides its messages and tools, by the names of OpenAI."""

    model: str = Field("", max_length=1000)
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
    stream_options: dict[str, Any] | None = None
    echo: bool = False
    prompt: str | list[str] | list[int] | list[list[int]] | None = None
    unsupported: str = ""
    """The first field that is not supported and would change the answer."""

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: str | list[str] | None) -> str | list[str] | None:
        if isinstance(value, list) and len(value) > 64:
            raise ValueError(f"has {len(value)} texts; it can have 64")
        return value

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Options":
        """The options of a request. CallRefused for a wrong value; null counts as absent."""
        given = {key: values[key] for key in cls.model_fields if values.get(key) is not None}
        given["unsupported"] = next((key for key in _UNSUPPORTED if values.get(key)), "")
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            raise CallRefused(f"{first['loc'][0] if first['loc'] else 'the request'}: {first['msg']}") from error

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(filter(None, [self.stop] if isinstance(self.stop, str) else self.stop or []))

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of the answer."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    def sampling(self) -> SamplingRecipe:
        """InputError for a value that is not allowed."""
        top_k = max(self.top_k, 0)  # other servers use -1 to disable it
        return section(SamplingRecipe, temperature=self.temperature, top_p=self.top_p, top_k=top_k, min_p=self.min_p)


@dataclass(frozen=True)
class ChatCall:
    """A request for an answer to messages."""

    messages: list[Message]
    """Roles system, user, assistant and tool. Content is text; arguments of tool calls are objects."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    options: Options = field(default_factory=Options)
    number: int = 0
    """Position among the calls of a server."""
    retry: bool = False
    """Whether the client repeats a request for which it received no answer."""

    @property
    def digest(self) -> str:
        return digest(self.messages, self.tools, self.options.limit, self.options.stops)


@dataclass(frozen=True)
class ChatAnswer:
    """An answer to a call."""

    text: str
    calls: list[tuple[str, ToolCall]]
    """Tool calls with their ids."""
    stop_reason: StopReason
    prompt_tokens: int
    tokens: int
    logprobs: list[dict[str, Any]] | None = None
    """Per token of the text, as OpenAI writes them; None if the call does not ask for them."""


def digest(*parts: Any) -> str:
    """A digest of JSON values, 32 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def shown_text(text: str, reason: StopReason, stops: Sequence[str]) -> str:
    """The text of an answer up to its stop string, which servers leave out."""
    if reason is not StopReason.STOP_STRING:
        return text
    return text[: min(text.find(stop) for stop in stops if stop in text)]


def event(value: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(value)}\n\n"


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CallRefused(f"{what} must be an object")
    return value


def openai_usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    """The numbers of tokens of prompts and of answers."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}


def openai_head(id: str, kind: str, model: str) -> dict[str, Any]:
    """The fields that every answer and every chunk begins with."""
    return {"id": id, "object": kind, "model": model, "created": int(time.time())}


def openai_error(message: str, kind: str) -> dict[str, Any]:
    """An error in the form of OpenAI."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": kind}}


def read_chat(body: dict[str, Any]) -> ChatCall:
    """Parse a request. CallRefused for unsupported features."""
    if body.get("functions"):
        raise CallRefused("functions is not supported; use tools")
    if _mapping(body.get("response_format") or {}, "response_format").get("type", "text") != "text":
        raise CallRefused("response_format is not supported; the policy samples freely")
    tools, messages = body.get("tools") or [], body.get("messages")
    if not isinstance(tools, list):
        raise CallRefused(f"tools has the wrong type, {type(tools).__name__}")
    for tool in tools:
        if not isinstance(
            _mapping(_mapping(tool, "a tool").get("function"), "the function of a tool").get("name"), str
        ):
            raise CallRefused("a tool has no name")
    if not isinstance(messages, list) or not messages:
        raise CallRefused("messages must be a list with at least one message")
    # Clients send null or no parts where a message has no text.
    given = [
        {**message, "content": ""} if _mapping(message, "a message").get("content") in (None, []) else message
        for message in messages
    ]
    try:
        read: list[Message] = [without_training_keys(message) for message in messages_of(given, "messages")]
    except UnusableRow as error:
        raise CallRefused(str(error)) from error
    return ChatCall(read, [] if body.get("tool_choice") == "none" else tools, Options.read(body))


def write_chat(call: ChatCall, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
    """The answers as a chat completion."""
    choices = []
    for index, answer in enumerate(answers):
        message = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
        calls = {"tool_calls": _tool_calls(answer)} if answer.calls else {}
        choices.append({"index": index, "message": message | calls, **_ending(answer)})
    usage = openai_usage(answers[0].prompt_tokens, sum(answer.tokens for answer in answers))
    head = openai_head(f"chatcmpl-{call.number}", "chat.completion", call.options.model)
    return head | {"choices": choices, "usage": usage}


async def chat_events(call: ChatCall, prompt_tokens: int, parts: AsyncIterator[str | ChatAnswer]) -> AsyncIterator[str]:
    """The parts as server-sent events of a streamed chat completion."""
    head = openai_head(f"chatcmpl-{call.number}", "chat.completion.chunk", call.options.model)

    def chunk(delta: dict[str, Any], **ending: Any) -> str:
        return event(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None, **ending}]})

    yield chunk({"role": "assistant", "content": ""})
    sent = 0
    async for part in parts:
        text = part if isinstance(part, str) else part.text[sent:]
        sent += len(text)
        if text:
            yield chunk({"content": text})
        if isinstance(part, ChatAnswer):
            for index, one in enumerate(_tool_calls(part)):
                yield chunk({"tool_calls": [{"index": index, **one}]})
            yield chunk({}, **_ending(part))
            if call.options.wants_usage:
                yield event(head | {"choices": [], "usage": openai_usage(prompt_tokens, part.tokens)})
    yield "data: [DONE]\n\n"


def _tool_calls(answer: ChatAnswer) -> list[dict[str, Any]]:
    return [
        {"id": id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for id, call in answer.calls
    ]


def _ending(answer: ChatAnswer) -> dict[str, Any]:
    reason = "tool_calls" if answer.calls else "length" if answer.stop_reason in CUT_OFF else "stop"
    return {"finish_reason": reason, "logprobs": None if answer.logprobs is None else {"content": answer.logprobs}}
