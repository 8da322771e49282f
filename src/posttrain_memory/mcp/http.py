"""The MCP server over HTTP: on the loopback address only, for clients with the token, and never for web pages."""

import asyncio
import hmac
import os
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from posttrain.errors import InputError

if TYPE_CHECKING:
    from mcp.server import Server

ADDRESS = "127.0.0.1"
"""The address cannot be configured, because personal notes should not be exposed to a network."""
PATH = "/mcp"
_TOKEN_CHARS = 16
"""Minimum length of a token chosen by the user."""
_BODY_BYTES = 262_144
"""Maximum size of a request body in bytes; larger ones get status 413."""
_CONNECTIONS = 64
"""Maximum number of simultaneous connections."""
_STRANGERS = 16
"""Maximum number of connections without a request that had the token. A new one replaces the oldest."""
_HEADER_SECONDS = 5.0
"""Time after which a connection without such a request is closed."""

App = Callable[
    [MutableMapping[str, Any], Callable[..., Awaitable[Any]], Callable[..., Awaitable[None]]], Awaitable[None]
]


def read_token(variable: str | None) -> str:
    """The token from the environment variable, or a random one. Raises InputError if the variable holds no valid
    token.
    """
    if variable is None:
        return secrets.token_urlsafe(32)
    token = os.environ.get(variable, "")
    if len(token) < _TOKEN_CHARS or not all("!" <= sign <= "~" for sign in token):
        raise InputError(
            f"--token-variable names {variable}, which does not hold a token of at least {_TOKEN_CHARS} visible ASCII "
            "characters; set one, or drop the option to get a random token"
        )
    return token


class Guard:
    """ASGI middleware that passes on only requests from a client on this machine with the token.

    Other requests get a status and one sentence: 403 for a Host header that is not this address (DNS rebinding) and
    for any Origin header (web pages), 401 without the token. Bodies are not read here; `app` limits their size.
    """

    def __init__(self, app: App, port: int, token: str) -> None:
        self._app = app
        self._hosts = (f"{ADDRESS}:{port}".encode(), f"localhost:{port}".encode())
        self._token = token.encode()

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[..., Awaitable[Any]],
        send: Callable[..., Awaitable[None]],
    ) -> None:
        refused = self.refusal(scope) if scope["type"] != "lifespan" else None
        if refused is None:
            await self._app(scope, receive, send)
            return
        status, why = refused
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": f"{why}\n".encode()})

    def refusal(self, scope: MutableMapping[str, Any]) -> tuple[int, str] | None:
        """Status and reason for a request that is not passed on; None for one that is."""

        def of(name: bytes) -> list[bytes]:
            return [value for key, value in scope["headers"] if key.lower() == name]

        hosts, tokens = of(b"host"), of(b"authorization")
        if scope["type"] != "http":
            return 403, "this is no HTTP request"
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return 403, "the Host header is not the address of this server"
        if of(b"origin"):
            return 403, "web pages may not use this server"
        # The scheme is case-insensitive, the token is not.
        scheme, _, token = tokens[0].partition(b" ") if len(tokens) == 1 else (b"", b"", b"")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(token, self._token):
            return 401, "send the token that the server printed at its start, as `Authorization: Bearer TOKEN`"
        return None


def guarded_protocol(guard: Guard) -> type[Any]:
    """The HTTP protocol of uvicorn, for which a connection is a stranger until a request on it has passed `guard`.

    A stranger is disconnected after `_HEADER_SECONDS`, and when `_STRANGERS` newer ones are connected. So connections
    that send nothing, or send their headers slowly, do not keep out a client with the token.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    strangers: dict[H11Protocol, asyncio.TimerHandle] = {}

    class GuardedProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(strangers) >= _STRANGERS:
                # `connection_lost` follows later, when others may have connected.
                oldest = next(iter(strangers))
                strangers.pop(oldest).cancel()
                oldest.connections.discard(oldest)
                oldest.transport.abort()
            strangers[self] = self.loop.call_later(_HEADER_SECONDS, transport.abort)

        def handle_events(self) -> None:
            super().handle_events()
            if self in strangers and self.scope is not None and guard.refusal(dict(self.scope)) is None:
                strangers.pop(self).cancel()

        def connection_lost(self, error: Exception | None) -> None:
            if self in strangers:
                strangers.pop(self).cancel()
            super().connection_lost(error)

    return GuardedProtocol


def open_listener(port: int) -> socket.socket:
    """A socket listening on `port` of the loopback address; 0 picks a free port. Raises InputError if the port is in
    use.
    """
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((ADDRESS, port))
        # Clients can connect from here on, and wait until the model is loaded.
        server.listen(_CONNECTIONS)
    except OSError as error:
        server.close()
        raise InputError(
            f"port {port} of {ADDRESS} cannot be used: {error.strerror}; choose another with --http"
        ) from None
    return server


def serve_http(server: "Server[Any]", on: socket.socket, token: str) -> None:
    """Serve any number of clients until a signal ends the process. Prints the address to stderr."""
    import uvicorn

    port = on.getsockname()[1]
    app = server.streamable_http_app(streamable_http_path=PATH, max_request_body_size=_BODY_BYTES)
    guard = Guard(app, port, token)
    config = uvicorn.Config(
        guard,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        ws="none",
        http=guarded_protocol(guard),
        loop="asyncio",
        limit_concurrency=_CONNECTIONS,
        timeout_graceful_shutdown=2,
    )
    print(f"posttrain: serving the vault at http://{ADDRESS}:{port}{PATH}", file=sys.stderr, flush=True)
    uvicorn.Server(config).run(sockets=[on])
