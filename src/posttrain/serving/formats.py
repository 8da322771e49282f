"""The two wire formats of the endpoint: chat completions of OpenAI and messages of Anthropic.

Each has a function that reads a request, one that writes an answer, and one that writes it as events of a stream.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

from posttrain.data.messages import UnusableRow, check_value, messages_of, without_training_keys
from posttrain.data.rendering import Message
from posttrain.episode import CUT_OFF, StopReason
from posttrain.errors import InputError, PosttrainError
from posttrain.rollout.agents.session import CallRefused, ChatAnswer, ChatCall

_T = TypeVar("_T")
MODEL = "policy"
"""The name under which the endpoint offers the policy. Requests may name any model."""

MAX_BODY = 32 << 20
"""Largest request in bytes."""
_BODY_SECONDS = 60
"""Time in which a request must be complete."""
_POLL_SECONDS = 0.25


def add_route(
    app: Any,
    path: str,
    answer: Callable[[Any, dict[str, Any]], Awaitable[dict[str, Any] | Iterator[str] | AsyncIterator[str]]],
    refusal: Callable[[str, int, str], dict[str, Any]],
) -> None:
    """Answer the requests to `path` of an application of starlette with what `answer` makes of the request and its JSON
    body: an object, or the events of a stream. `refusal` writes errors.
    """
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse

    async def post(request: Request) -> Response:
        try:
            made = await answer(request, await _read_body(request))
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            status, values = refused(error)
            # What follows in a body that is too large or too slow is not read.
            close = {"connection": "close"} if status in (408, 413) else None
            return JSONResponse(values, status, close)
        if isinstance(made, dict):
            return JSONResponse(made)
        return StreamingResponse(whole(made), media_type="text/event-stream")

    def refused(error: Exception) -> tuple[int, dict[str, Any]]:
        if isinstance(error, CallRefused):
            return error.status, refusal(str(error), error.status, error.kind)
        status, kind = (400, "invalid_request_error") if isinstance(error, InputError) else (500, "api_error")
        why = str(error) if isinstance(error, PosttrainError) else f"unexpected {type(error).__name__}: {error}"
        if status == 500:
            print(f"posttrain: {path} failed: {why}", file=sys.stderr)
        return status, refusal(why, status, kind)

    async def whole(events: Iterator[str] | AsyncIterator[str]) -> AsyncIterator[str]:
        """The events. After an error, its event is the last: the status of the answer is sent already."""
        try:
            if isinstance(events, Iterator):
                for event in events:
                    yield event
            else:
                async for event in events:
                    yield event
        except Exception as error:
            values = refused(error)[1]
            yield _named(values) if "type" in values else _event(values)

    app.add_route(path, post, methods=["POST"])


async def unless_gone(request: Any, answer: "asyncio.Future[_T]", gone: Callable[[], bool] = lambda: False) -> _T:
    """The answer. It is cancelled if the client closes the connection, or `gone()` holds."""
    from starlette.requests import ClientDisconnect

    try:
        while not answer.done():
            await asyncio.wait({answer}, timeout=_POLL_SECONDS)
            if not answer.done() and (gone() or await request.is_disconnected()):
                raise ClientDisconnect
        return answer.result()
    finally:
        answer.cancel()


async def _read_body(request: Any) -> dict[str, Any]:
    """The JSON object of a request of starlette. CallRefused if it is too large or too slow, nested too deeply, or no
    object.
    """
    received = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                received += part
                if len(received) > MAX_BODY:
                    raise CallRefused(f"the request has more than {MAX_BODY >> 20} MiB", 413, "request_too_large")
    except TimeoutError:
        raise CallRefused(f"the request was not complete after {_BODY_SECONDS} s", 408, "request_timeout") from None
    try:
        body = json.loads(received)
        check_value(body, "it")
        json.dumps(body, allow_nan=False)
    except UnusableRow as error:
        raise CallRefused(f"the request cannot be used: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CallRefused(f"the request is not valid JSON ({type(error).__name__})") from error
    if not isinstance(body, dict):
        raise CallRefused("the request must be a JSON object")
    return body


def _refuse(message: str) -> CallRefused:
    return CallRefused(message)


def _get(values: Mapping[str, Any], key: str, kind: type | tuple[type, ...], default: Any) -> Any:
    """`values[key]`, `default` where it is absent or null; CallRefused for another type."""
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise _refuse(f"{key} has the wrong type, {type(value).__name__}")
    return value


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refuse(f"{what} must be an object")
    return value


def _text(content: Any, what: str) -> str:
    """Content as text: a string, or a list of text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _refuse(f"{what} must be text or a list of parts")
    parts = []
    for part in content:
        if isinstance(part, str):
            parts.append(part)
            continue
        kind = _mapping(part, f"a part of {what}").get("type")
        if kind not in ("text", "input_text", "output_text"):
            raise _refuse(f"{what} has a part of type {kind}; only text is supported")
        parts.append(_get(part, "text", str, ""))
    return "\n".join(parts)


def _budget(values: Mapping[str, Any], *keys: str) -> int | None:
    for key in keys:
        if (value := _get(values, key, int, None)) is not None:
            if value < 1:
                raise _refuse(f"{key} is {value}; it must be at least 1")
            return int(value)
    return None


def _stops(value: Any, key: str) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts) or len(texts) > 64:
        raise _refuse(f"{key} must be at most 64 texts that are not empty")
    return tuple(texts)


def _messages(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _refuse("messages must be a list with at least one message")
    return [_mapping(message, "a message") for message in messages]


def _as_in_rows(messages: list[dict[str, Any]]) -> list[Message]:
    """The messages as those of a training row are read."""
    try:
        return [without_training_keys(message) for message in messages_of(messages, "messages")]
    except UnusableRow as error:
        raise _refuse(str(error)) from error


def _call(id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    if not isinstance(name, str) or not name:
        raise _refuse("a tool call has no name")
    return {"id": str(id), "type": "function", "function": {"name": name, "arguments": arguments}}


# -- OpenAI
# -------------------------------------------------------------------------------------------------------------


def openai_call(body: dict[str, Any], retry: bool) -> ChatCall:
    """Parse a chat completions request. CallRefused for unsupported features."""
    if _get(body, "n", int, 1) != 1:
        raise _refuse("n must be 1; send several requests")
    if body.get("logprobs") or body.get("functions"):
        raise _refuse("logprobs and functions are not supported; use tools")
    if _get(body, "response_format", dict, {}).get("type", "text") != "text":
        raise _refuse("response_format is not supported; the policy samples freely")
    tools = [_mapping(tool, "a tool") for tool in _get(body, "tools", list, [])]
    for tool in tools:
        if not isinstance(_mapping(tool.get("function"), "the function of a tool").get("name"), str):
            raise _refuse("a tool has no name")
    # Clients send null or no parts where a message has no text.
    messages = [
        {**message, "content": ""} if message.get("content") in (None, []) else message for message in _messages(body)
    ]
    return ChatCall(
        _as_in_rows(messages),
        [] if body.get("tool_choice") == "none" else tools,
        _budget(body, "max_completion_tokens", "max_tokens"),
        _stops(body.get("stop"), "stop"),
        retry,
    )


def _openai_reason(answer: ChatAnswer) -> str:
    if answer.calls:
        return "tool_calls"
    return "length" if answer.stop_reason in CUT_OFF else "stop"


def _openai_usage(answer: ChatAnswer) -> dict[str, int]:
    total = answer.prompt_tokens + answer.tokens
    return {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.tokens, "total_tokens": total}


def _openai_calls(answer: ChatAnswer) -> list[dict[str, Any]]:
    return [
        {"id": id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for id, call in answer.calls
    ]


def openai_answer(answer: ChatAnswer, body: dict[str, Any]) -> dict[str, Any]:
    """The answer as a chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
    if answer.calls:
        message["tool_calls"] = _openai_calls(answer)
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _openai_reason(answer)}
    return {
        "id": f"chatcmpl-{answer.number}",
        "object": "chat.completion",
        "created": 0,
        "model": str(body.get("model") or MODEL),
        "choices": [choice],
        "usage": _openai_usage(answer),
    }


def openai_events(answer: ChatAnswer, body: dict[str, Any]) -> Iterator[str]:
    """The answer as server-sent events of a streamed chat completion."""
    start = {
        "id": f"chatcmpl-{answer.number}",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": str(body.get("model") or MODEL),
    }

    def chunk(delta: dict[str, Any], reason: str | None = None) -> str:
        return _event({**start, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})

    yield chunk({"role": "assistant", "content": ""})
    if answer.text:
        yield chunk({"content": answer.text})
    for index, call in enumerate(_openai_calls(answer)):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, _openai_reason(answer))
    if _get(body, "stream_options", dict, {}).get("include_usage"):
        yield _event({**start, "choices": [], "usage": _openai_usage(answer)})
    yield "data: [DONE]\n\n"


def openai_models(name: str) -> dict[str, Any]:
    """The list of models of a server with one."""
    return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "posttrain"}]}


def openai_error(message: str, status: int, kind: str) -> dict[str, Any]:
    """An error in the form of OpenAI."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": kind}}


def openai_refusal(message: str, status: int) -> str:
    """The body of a request that is refused before it is read. Clients of both formats read the status alone."""
    return json.dumps(openai_error(message, status, "authentication_error" if status == 401 else "permission_error"))


# -- Anthropic
# ----------------------------------------------------------------------------------------------------------


def anthropic_call(body: dict[str, Any], retry: bool) -> ChatCall:
    """Parse a messages request. CallRefused for unsupported features."""
    messages: list[Message] = []
    if system := _text(body.get("system"), "system"):
        messages.append({"role": "system", "content": system})
    for message in _messages(body):
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise _refuse(f"a message has the role {role!r}")
        messages += _blocks(role, message.get("content"))
    tools = [_mapping(tool, "a tool") for tool in _get(body, "tools", list, [])]
    described = []
    for tool in tools:
        if not isinstance(tool.get("name"), str) or "input_schema" not in tool:
            raise _refuse("a tool needs a name and an input_schema; tools of the server are not supported")
        function = {
            "name": tool["name"],
            "description": _get(tool, "description", str, ""),
            "parameters": _mapping(tool["input_schema"], "input_schema"),
        }
        described.append({"type": "function", "function": function})
    return ChatCall(
        _as_in_rows(messages),
        [] if _get(body, "tool_choice", dict, {}).get("type") == "none" else described,
        _budget(body, "max_tokens"),
        _stops(body.get("stop_sequences"), "stop_sequences"),
        retry,
    )


def _blocks(role: str, content: Any) -> list[Message]:
    """The messages of one message of Anthropic, in which tool results are blocks of a user message."""
    if not isinstance(content, list):
        return [{"role": role, "content": _text(content, "the content of a message")}]
    results: list[Message] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls = []
    for block in content:
        block = _mapping(block, "a block")
        kind = block.get("type")
        if kind == "tool_use" and role == "assistant":
            calls.append(_call(block.get("id"), block.get("name"), _get(block, "input", dict, {})))
        elif kind == "tool_result" and role == "user":
            text = _text(block.get("content"), "a tool result")
            results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": text})
        elif kind == "thinking" and role == "assistant":
            thoughts.append(_get(block, "thinking", str, ""))
        elif kind != "redacted_thinking":
            texts.append(_text([block], "a message"))
    text = "\n".join(texts)
    reasoning = {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    if role == "assistant" and calls:
        return [{"role": role, "content": text, "tool_calls": calls, **reasoning}]
    return [*results, *([{"role": role, "content": text, **reasoning}] if text or not results else [])]


def _anthropic_reason(answer: ChatAnswer) -> str:
    if answer.calls:
        return "tool_use"
    if answer.stop_reason in CUT_OFF:
        return "max_tokens"
    return "stop_sequence" if answer.stop_reason is StopReason.STOP_STRING else "end_turn"


def _anthropic_blocks(answer: ChatAnswer) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": answer.text}] if answer.text or not answer.calls else []
    uses = [{"type": "tool_use", "id": id, "name": one.name, "input": one.arguments} for id, one in answer.calls]
    return [*text, *uses]


def anthropic_answer(answer: ChatAnswer, body: dict[str, Any]) -> dict[str, Any]:
    """The answer as a message."""
    return {
        "id": f"msg_{answer.number}",
        "type": "message",
        "role": "assistant",
        "model": str(body.get("model") or MODEL),
        "content": _anthropic_blocks(answer),
        "stop_reason": _anthropic_reason(answer),
        "stop_sequence": answer.stop_string,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.tokens},
    }


def anthropic_events(answer: ChatAnswer, body: dict[str, Any]) -> Iterator[str]:
    """The answer as server-sent events of a streamed message."""
    whole = anthropic_answer(answer, body)
    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": 0}
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield _named({"type": "message_start", "message": begun})
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield _named({"type": "content_block_start", "index": index, "content_block": empty})
        yield _named({"type": "content_block_delta", "index": index, "delta": delta})
        yield _named({"type": "content_block_stop", "index": index})
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    yield _named({"type": "message_delta", "delta": ended, "usage": {"output_tokens": answer.tokens}})
    yield _named({"type": "message_stop"})


def anthropic_error(message: str, status: int, kind: str) -> dict[str, Any]:
    """An error in the form of Anthropic."""
    return {"type": "error", "error": {"type": kind, "message": message}}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _named(value: dict[str, Any]) -> str:
    return f"event: {value['type']}\n{_event(value)}"
