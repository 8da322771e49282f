"""The HTTP application of `posttrain serve` and of the endpoint of agents: chats of OpenAI, answered by a backend."""

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from posttrain.data.messages import UnusableRow, check_value
from posttrain.errors import InputError, PosttrainError
from posttrain.images import forgetting
from posttrain.loopback import App, Guard, Refusal, Scope, header
from posttrain.serving.formats import (
    CallRefused,
    ChatAnswer,
    ChatCall,
    chat_events,
    event,
    openai_error,
    read_chat,
    write_chat,
)

_T = TypeVar("_T")
MAX_BODY = 32 << 20
"""Largest request in bytes."""
_BODY_SECONDS = 60
"""Time in which a request must be complete."""
_POLL_SECONDS = 0.25


class ChatBackend(Protocol):
    """Answers calls. `request` is the request of starlette, with its headers."""

    name: str
    """The name of its model. Requests may name any model."""

    async def answers(self, call: ChatCall, request: Any) -> list[ChatAnswer]:
        """The answers to a call, one per choice. CallRefused for a call that is not supported."""
        ...

    async def stream(self, call: ChatCall, request: Any) -> tuple[int, AsyncIterator[str | ChatAnswer]]:
        """Number of tokens of the prompt, and pieces of the answer's text followed by the answer. Errors as `answers`."""
        ...


def application(backend: ChatBackend) -> Any:
    """A FastAPI application that answers chat completions with `backend`."""
    from fastapi import FastAPI
    from starlette.responses import JSONResponse

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    numbers = itertools.count()

    async def chat(request: Any, body: dict[str, Any]) -> dict[str, Any] | AsyncIterator[str]:
        retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        call = read_chat(body | {"model": body.get("model") or backend.name})
        call = replace(call, number=next(numbers), retry=retry)
        if call.options.stream:
            return chat_events(call, *await backend.stream(call, request))
        return write_chat(call, await backend.answers(call, request))

    add_route(app, "/v1/chat/completions", chat)
    model = {"id": backend.name, "object": "model", "created": 0, "owned_by": "posttrain"}
    models = {"object": "list", "data": [model]}
    app.add_route("/v1/models", lambda request: JSONResponse(models), methods=["GET"])
    return app


def key_of(scope: Scope) -> str:
    """The API key of a request; empty if it has none."""
    return next(filter(None, header(scope, b"authorization")), b"").decode("latin-1").removeprefix("Bearer ").strip()


def guarded(app: App, port: int, check: Callable[[str], str | None]) -> Guard:
    """`app`, restricted to programs of this machine whose key passes `check`, which returns what is wrong with it."""

    def refuse(scope: Scope) -> Refusal | None:
        why = check(key_of(scope))
        return None if why is None else (401, why)

    def write(why: str, status: int) -> str:
        return json.dumps(openai_error(why, "authentication_error" if status == 401 else "permission_error"))

    return Guard(app, port, refuse, write)


def add_route(
    app: Any, path: str, answer: Callable[[Any, dict[str, Any]], Awaitable[dict[str, Any] | AsyncIterator[str]]]
) -> None:
    """Answer the requests to `path` of an application of starlette with what `answer` makes of the request and its JSON
    body: an object, or the events of a stream.
    """
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse

    class Forgetting(StreamingResponse):
        """A stream after which the images of its request are forgotten."""

        later: ExitStack

        async def __call__(self, *connection: Any) -> None:
            try:
                await super().__call__(*connection)
            finally:
                self.later.close()

    async def post(request: Request) -> Response:
        later = ExitStack()
        response: Response | None = None
        try:
            with forgetting(later):
                response = await respond(request)
            return response
        finally:
            if isinstance(response, Forgetting):
                response.later = later
            else:
                later.close()

    async def respond(request: Request) -> Response:
        try:
            made = await answer(request, await _read_body(request))
            if isinstance(made, dict):
                return JSONResponse(made)
            # Compute the first event now, so that an error still gets its own HTTP status.
            return Forgetting(whole(await anext(made), made), media_type="text/event-stream")
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            status, values = refused(error)
            # What follows in a body that is too large or too slow is not read.
            return JSONResponse(values, status, {"connection": "close"} if status in (408, 413) else None)

    def refused(error: Exception) -> tuple[int, dict[str, Any]]:
        if isinstance(error, CallRefused):
            return error.status, openai_error(str(error), error.kind)
        status, kind = (400, "invalid_request_error") if isinstance(error, InputError) else (500, "api_error")
        why = str(error) if isinstance(error, PosttrainError) else f"unexpected {type(error).__name__}: {error}"
        if status == 500:
            print(f"posttrain: {path} failed: {why}", file=sys.stderr)
        return status, openai_error(why, kind)

    async def whole(first: str, events: AsyncIterator[str]) -> AsyncIterator[str]:
        """The events. After an error, its event is the last: the status of the answer is sent already."""
        yield first
        try:
            async for one in events:
                yield one
        except Exception as error:
            yield event(refused(error)[1])

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
