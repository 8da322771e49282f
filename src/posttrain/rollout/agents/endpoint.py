"""The endpoint through which agents call the policy: HTTP on loopback, with one key per episode."""

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator
from typing import Any

from posttrain.loopback import ADDRESS, http_server, open_listener
from posttrain.plugins import require_module
from posttrain.rollout.agents.session import AgentSession
from posttrain.serving.formats import CallRefused, ChatAnswer, ChatCall
from posttrain.serving.server import application, guarded, key_of, unless_gone

_REMEMBERED = 10_000
"""Number of sessions to keep before ended ones are dropped."""


class AgentEndpoint:
    """Serves chat completions in a thread, as a context manager. A key selects the session that answers."""

    name = "policy"

    def __init__(self) -> None:
        """InputError if fastapi or uvicorn is not installed."""
        require_module("uvicorn", "agent")
        require_module("fastapi", "agent")
        self._sessions: dict[str, AgentSession] = {}
        self._socket = open_listener(0, "agent.command")  # now, so that calls wait until the thread accepts them
        port = self._socket.getsockname()[1]
        self.url = f"http://{ADDRESS}:{port}"
        """Without the path `/v1`."""
        unknown = "unknown key; use the one in the environment of the agent"
        app = guarded(application(self), port, lambda key: None if key in self._sessions else unknown)
        self._server = http_server(app)
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

    async def answers(self, call: ChatCall, request: Any) -> list[ChatAnswer]:
        """The answer of the session of the request's key, computed in the session's event loop; cancelled if the client
        closes the connection."""
        if call.options.n != 1:
            raise CallRefused("n must be 1; send several requests")
        if call.options.logprobs:
            raise CallRefused("logprobs is not supported; the run records them")
        session, ended = self._sessions[key_of(request.scope)], "the episode of this key has ended"
        refused = CallRefused(ended, 403, "permission_error")
        if session.loop.is_closed():
            session.info["late"] += 1
            raise refused
        coroutine = session.complete(call)
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, session.loop)
        except RuntimeError:  # the loop has closed in between
            coroutine.close()
            raise refused from None
        try:
            return [await unless_gone(request, asyncio.wrap_future(future), session.loop.is_closed)]
        except asyncio.CancelledError:
            if not future.cancelled():
                raise
            raise refused from None
        except Exception as error:
            if session.error is not None:
                raise CallRefused("the engine failed, and the run ends", 403, "api_error") from error
            raise

    async def stream(self, call: ChatCall, request: Any) -> tuple[int, AsyncIterator[str | ChatAnswer]]:
        """As `ChatBackend.stream`. The answer is complete, and it is the only part."""
        (answer,) = await self.answers(call, request)

        async def parts() -> AsyncIterator[str | ChatAnswer]:
            yield answer

        return answer.prompt_tokens, parts()
