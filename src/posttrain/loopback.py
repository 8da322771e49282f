"""HTTP servers that are reachable only from this machine: the loopback address, and limits on connections without a
token.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from posttrain.errors import InputError

ADDRESS = "127.0.0.1"
"""Not configurable, because notes and runs should not be exposed to a network."""
CONNECTIONS = 64
"""Maximum number of simultaneous connections."""
_ANONYMOUS = 16
"""Maximum number of connections without an admitted request. A new connection replaces the oldest."""
_GRACE_SECONDS = 0.5
"""Seconds that a connection has to send its headers, regardless of the number of newer connections."""
_FLOOD = 512
"""Maximum number of connections without an admitted request, including new ones. Further connections are refused."""
_BACKLOG = 256
"""Number of connections to accept at once. Together with `_FLOOD`, it stays below the usual limit of 1,024 open
files.
"""
_HEADER_SECONDS = 5.0
"""Seconds after which a connection without an admitted request is closed."""

Scope = MutableMapping[str, Any]
Receive = Callable[..., Awaitable[Any]]
Send = Callable[..., Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def header(scope: Mapping[str, Any], name: bytes) -> list[bytes]:
    """Every value of a header of a request; `name` in lower case."""
    return [value for key, value in scope["headers"] if key.lower() == name]


def names_this_server(scope: Mapping[str, Any], port: int) -> bool:
    """Whether the Host header is this address. After DNS rebinding it would differ."""
    hosts = header(scope, b"host")
    return len(hosts) == 1 and hosts[0].lower() in (f"{ADDRESS}:{port}".encode(), f"localhost:{port}".encode())


async def refuse(send: Send, status: int, why: str, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    """Answer with `status` and one sentence, and close the connection."""
    given = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close"), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": given})
    await send({"type": "http.response.body", "body": f"{why}\n".encode()})


def guarded_protocol(
    admitted: Callable[[Scope], bool], room: int = _ANONYMOUS, seconds: float = _HEADER_SECONDS
) -> type[Any]:
    """The HTTP protocol of uvicorn, on which a connection is anonymous until a request on it is `admitted`.

    An anonymous connection is closed after `seconds`. If there are more than `room`, the oldest is closed once it is
    `_GRACE_SECONDS` old. Connections that send nothing, or send their headers slowly, therefore cannot keep out a
    client with the token, however fast they are opened.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    anonymous: dict[Any, asyncio.TimerHandle] = {}

    class GuardedProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(anonymous) >= _FLOOD:
                self.drop()
                return
            anonymous[self] = self.loop.call_later(seconds, transport.abort)
            self.loop.call_later(_GRACE_SECONDS, self.make_room)

        def make_room(self) -> None:
            if len(anonymous) > room:
                oldest = next(iter(anonymous))
                anonymous.pop(oldest).cancel()
                oldest.drop()

        def drop(self) -> None:
            # `connection_lost` follows later, when others may have connected.
            self.connections.discard(self)
            self.transport.abort()

        def handle_events(self) -> None:
            super().handle_events()
            if self in anonymous and self.scope is not None and admitted(dict(self.scope)):
                anonymous.pop(self).cancel()

        def connection_lost(self, error: Exception | None) -> None:
            if self in anonymous:
                anonymous.pop(self).cancel()
            super().connection_lost(error)

    return GuardedProtocol


def open_listener(port: int, option: str) -> socket.socket:
    """A socket listening on `port` of the loopback address; 0 picks a free port.

    Raises InputError, which names the `option` that chose the port, if the port is in use.
    """
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((ADDRESS, port))
        # Clients can connect from here on. They wait until the server has loaded its data.
        server.listen(CONNECTIONS)
    except OSError as error:
        server.close()
        raise InputError(
            f"port {port} of {ADDRESS} cannot be used: {error.strerror}; choose another with {option}"
        ) from None
    return server


def serve(app: App, on: socket.socket, admitted: Callable[[Scope], bool]) -> None:
    """Serve `app` until a signal ends the process. Requests in progress then have two seconds and are cancelled."""
    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # An open page follows its server for as long as it can, so cancelling it is no error to report.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            await super().shutdown(sockets)

    config = uvicorn.Config(
        app,
        log_level="error",  # any client could fill the terminal with warnings about malformed requests
        access_log=False,
        proxy_headers=False,
        server_header=False,
        ws="none",
        http=guarded_protocol(admitted),
        loop="asyncio",
        limit_concurrency=CONNECTIONS + _FLOOD,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=2,
    )
    Server(config).run(sockets=[on])
