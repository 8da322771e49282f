"""The endpoint through which agents call the policy: HTTP on loopback, with one key per episode."""

import asyncio
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from posttrain.loopback import ADDRESS, Scope, guarded_protocol
from posttrain.plugins import require_module
from posttrain.rollout.agents import formats
from posttrain.rollout.agents.session import AgentSession, CallRefused, ChatAnswer, ChatCall

_POLL_SECONDS = 0.25
_LOCAL_NAMES = [ADDRESS, "localhost"]
_STARTING = 256
"""Maximum number of open connections that have not yet sent a known key, for agents that start at the same time."""
_HEADER_SECONDS = 30.0
"""Seconds after which such a connection is closed. Generous, because many agents that start at once are slow."""
_REMEMBERED = 100_000
"""Number of sessions to keep before ended ones are dropped."""


class AgentEndpoint:
    """Serves chat completions and messages in a thread, as a context manager. A key selects the session that
    answers.
    """

    def __init__(self) -> None:
        """InputError if fastapi or uvicorn is not installed."""
        uvicorn = require_module("uvicorn", "agent")
        require_module("fastapi", "agent")
        self._sessions: dict[str, AgentSession] = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind((ADDRESS, 0))
        self._socket.listen(2048)  # now, so that calls wait until the thread accepts them
        self.url = f"http://{ADDRESS}:{self._socket.getsockname()[1]}"
        """Without the path `/v1`: OpenAI clients expect it in their base URL, Anthropic clients add it."""
        config = uvicorn.Config(
            _app(self._session),
            log_level="critical",
            access_log=False,
            lifespan="off",
            http=guarded_protocol(self._admits, _STARTING, _HEADER_SECONDS),
            timeout_graceful_shutdown=1,
            backlog=2048,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="agent endpoint", daemon=True
        )

    def __enter__(self) -> "AgentEndpoint":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def open(self, session: AgentSession) -> str:
        """The key of a session. The session refuses calls once it has ended."""
        key = f"sk-posttrain-{secrets.token_urlsafe(24)}"
        if len(self._sessions) >= _REMEMBERED:
            self._sessions = {name: one for name, one in self._sessions.items() if not one.ended}
        self._sessions[key] = session
        return key

    def _admits(self, scope: Scope) -> bool:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        return _key(headers) in self._sessions

    def _session(self, key: str) -> AgentSession:
        session = self._sessions.get(key)
        if session is None:
            raise CallRefused("unknown key; use the one in the environment of the agent", 401, "authentication_error")
        return session


def _app(find: Callable[[str], AgentSession]) -> Any:
    """The application; `find` returns the session of a key or raises CallRefused."""
    from fastapi import FastAPI
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    # Checks the Host header, so that a web page cannot reach the endpoint by DNS rebinding.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=_LOCAL_NAMES)

    def route(
        path: str,
        read: Callable[[dict[str, Any], bool], ChatCall],
        write: Callable[[ChatAnswer, dict[str, Any]], dict[str, Any]],
        events: Callable[[ChatAnswer, dict[str, Any]], Iterator[str]],
        refusal: Callable[[str, int, str], dict[str, Any]],
    ) -> None:
        async def post(request: Request) -> Response:
            try:
                session = find(_key(request.headers))
                body = await formats.read_body(request)
                retry = request.headers.get("x-stainless-retry-count", "0") != "0"
                answer = await _ask(request, session, read(body, retry))
            except CallRefused as error:
                return JSONResponse(refusal(str(error), error.status, error.kind), error.status)
            except ClientDisconnect:
                return Response(status_code=499)
            if body.get("stream"):
                return StreamingResponse(events(answer, body), media_type="text/event-stream")
            return JSONResponse(write(answer, body))

        app.add_route(path, post, methods=["POST"])

    route(
        "/v1/chat/completions",
        formats.openai_call,
        formats.openai_answer,
        formats.openai_events,
        formats.openai_error,
    )
    route(
        "/v1/messages",
        formats.anthropic_call,
        formats.anthropic_answer,
        formats.anthropic_events,
        formats.anthropic_error,
    )

    async def models(request: Request) -> Response:
        try:
            find(_key(request.headers))
        except CallRefused as error:
            return JSONResponse(formats.openai_error(str(error), error.status, error.kind), error.status)
        model = {"id": formats.MODEL, "object": "model", "created": 0, "owned_by": "posttrain"}
        return JSONResponse({"object": "list", "data": [model]})

    app.add_route("/v1/models", models, methods=["GET"])
    return app


def _key(headers: Any) -> str:
    """The key in the header of either format."""
    given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
    return str(given).strip()


async def _ask(request: Any, session: AgentSession, call: ChatCall) -> ChatAnswer:
    """The session's answer, computed in its own event loop; cancelled if the client closes the connection."""
    from starlette.requests import ClientDisconnect

    ended = CallRefused("the episode of this key has ended", 403, "permission_error")
    if session.loop.is_closed():
        session.info["late"] += 1
        raise ended
    coroutine = session.complete(call)
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, session.loop)
    except RuntimeError:  # the loop has closed in between
        coroutine.close()
        raise ended from None
    waiting = asyncio.wrap_future(future)
    while not waiting.done():
        await asyncio.wait({waiting}, timeout=_POLL_SECONDS)
        if not waiting.done() and (session.loop.is_closed() or await request.is_disconnected()):
            future.cancel()
            raise ClientDisconnect
    if waiting.cancelled():
        raise ended
    error = waiting.exception()
    if error is not None and not isinstance(error, CallRefused):
        raise CallRefused("the engine failed, and the run ends", 403, "api_error")
    return waiting.result()
