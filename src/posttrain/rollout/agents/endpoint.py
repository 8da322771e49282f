"""The endpoint through which agents call the policy: HTTP on loopback, with one key per episode."""

import asyncio
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

from posttrain.loopback import ADDRESS, Guard, Refusal, Scope, http_server, open_listener
from posttrain.plugins import require_module
from posttrain.rollout.agents import formats
from posttrain.rollout.agents.session import AgentSession, CallRefused, ChatAnswer, ChatCall

_REMEMBERED = 10_000
"""Number of sessions to keep before ended ones are dropped."""


class AgentEndpoint:
    """Serves chat completions and messages in a thread, as a context manager. A key selects the session that
    answers.
    """

    def __init__(self) -> None:
        """InputError if fastapi or uvicorn is not installed."""
        require_module("uvicorn", "agent")
        require_module("fastapi", "agent")
        self._sessions: dict[str, AgentSession] = {}
        self._socket = open_listener(0, "agent.command")  # now, so that calls wait until the thread accepts them
        port = self._socket.getsockname()[1]
        self.url = f"http://{ADDRESS}:{port}"
        """Without the path `/v1`: OpenAI clients expect it in their base URL, Anthropic clients add it."""
        self._server = http_server(
            Guard(_app(lambda key: self._sessions[key]), port, self._check, formats.openai_refusal)
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="agent endpoint", daemon=True
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

    def _check(self, scope: Scope) -> Refusal | None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if _key(headers) in self._sessions:
            return None
        return 401, "unknown key; use the one in the environment of the agent"


def _app(session_of: Callable[[str], AgentSession]) -> Any:
    """The application; `session_of` returns the session of a key that was checked."""
    from fastapi import FastAPI
    from starlette.responses import JSONResponse

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    def route(
        path: str,
        read: Callable[[dict[str, Any], bool], ChatCall],
        write: Callable[[ChatAnswer, dict[str, Any]], dict[str, Any]],
        events: Callable[[ChatAnswer, dict[str, Any]], Iterator[str]],
        refusal: Callable[[str, int, str], dict[str, Any]],
    ) -> None:
        async def answer(request: Any, body: dict[str, Any]) -> dict[str, Any] | Iterator[str]:
            retry = request.headers.get("x-stainless-retry-count", "0") != "0"
            made = await _ask(request, session_of(_key(request.headers)), read(body, retry))
            return events(made, body) if body.get("stream") else write(made, body)

        formats.add_route(app, path, answer, refusal)

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
    app.add_route("/v1/models", lambda request: JSONResponse(formats.openai_models(formats.MODEL)), methods=["GET"])
    return app


def _key(headers: Any) -> str:
    """The key in the header of either format."""
    given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
    return str(given).strip()


async def _ask(request: Any, session: AgentSession, call: ChatCall) -> ChatAnswer:
    """The session's answer, computed in its own event loop; cancelled if the client closes the connection."""
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
    try:
        return await formats.unless_gone(request, asyncio.wrap_future(future), session.loop.is_closed)
    except asyncio.CancelledError:
        if not future.cancelled():
            raise
        raise ended from None
    except Exception as error:
        if session.error is not None:
            raise CallRefused("the engine failed, and the run ends", 403, "api_error") from error
        raise
