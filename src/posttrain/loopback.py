"""HTTP servers that are reachable only from this machine: the loopback address, one guard of all requests, and a limit of
connections without a token."""

import asyncio
import logging
import select
import socket
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from itertools import islice
from typing import Any

from posttrain.errors import InputError

ADDRESS = "127.0.0.1"
"""Not configurable, because notes and runs should not be exposed to a network."""
_CONNECTIONS = 768
"""Number of connections beyond which requests get status 503. It stays below the usual limit of 1,024 open files."""
_ANONYMOUS = 256
"""Number of connections without an admitted request beyond which a new one replaces the oldest."""
_BACKLOG = 128
"""Number of connections to accept between two reads of those that were accepted before."""
_DRAIN_SECONDS, _DRAINED = 1.0, 1 << 20
"""Seconds and bytes for which the body of a refused request is read."""
_HEADER_SECONDS = 10.0
"""Seconds after which a connection without an admitted request is closed. Generous, because many agents that start at
once are slow."""

Scope = MutableMapping[str, Any]
Receive = Callable[..., Awaitable[Any]]
Send = Callable[..., Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Refusal = tuple[int, str]
"""Status and reason."""


def header(scope: Mapping[str, Any], name: bytes) -> list[bytes]:
    """Every value of a header of a request; `name` in lower case."""
    return [value for key, value in scope["headers"] if key.lower() == name]


class Guard:
    """ASGI middleware that passes on only requests that no rule refuses; others get a status and one sentence.

    It refuses what is no HTTP request for a path, a Host header that is not this address (DNS rebinding), an Origin header
    (web pages), and what `check` refuses, such as a request without the token.
    """

    def __init__(
        self,
        app: App,
        port: int,
        check: Callable[[Scope], Refusal | None],
        write: Callable[[str, int], str] = lambda why, status: why,
    ) -> None:
        """`write`: the body of a refusal."""
        self.app, self._check, self._write = app, check, write
        self.hosts = (f"{ADDRESS}:{port}".encode(), f"localhost:{port}".encode())
        self.origins: tuple[bytes, ...] = ()
        """Allowed values of Origin."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self.refusal(scope) if scope["type"] != "lifespan" else None
        if refusal is None:
            await self.app(scope, receive, send)
            return
        status, why = refusal
        # Closing a connection with a body that was not read resets it, and the client may lose the answer.
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                left = _DRAINED if scope["type"] == "http" else 0
                while left > 0 and (part := await receive()).get("more_body"):
                    left -= len(part.get("body", b""))
        given = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        if status == 401:
            given.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": status, "headers": given})
        await send({"type": "http.response.body", "body": f"{self._write(why, status)}\n".encode()})

    def refusal(self, scope: Scope) -> Refusal | None:
        """Why a request is not passed on; None for one that is."""
        if scope["type"] != "http":
            return 403, "this is not an HTTP request"
        path = scope["raw_path"]
        # Browsers read //host and /\host in an answer as the address of another server.
        if not path.startswith(b"/") or path.startswith(b"//") or b"\\" in path:
            return 400, "the target of the request is not a path of this server"
        hosts = header(scope, b"host")
        if len(hosts) != 1 or hosts[0].lower() not in self.hosts:
            return 403, "the Host header is not the address of this server"
        if any(origin not in self.origins for origin in header(scope, b"origin")):
            return 403, "web pages may not use this server"
        return self._check(scope)


def guarded_protocol(guard: Guard) -> type[Any]:
    """The HTTP protocol of uvicorn, on which a connection is anonymous until a request on it passes `guard`.

    An anonymous connection is closed after `_HEADER_SECONDS`. If there are more than `_ANONYMOUS`, the oldest are closed,
    but none whose first bytes wait to be read: it is late because this process was busy. Nor is a newer one closed in its
    place. Connections that send nothing, or send their headers slowly, therefore cannot keep out a client with the token,
    however fast they are opened.
    """
    from h11 import LocalProtocolError
    from uvicorn.protocols.http.h11_impl import H11Protocol

    anonymous: dict[Any, asyncio.TimerHandle] = {}

    class GuardedProtocol(H11Protocol):
        silent = True
        """Whether nothing was read from it."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            anonymous[self] = self.loop.call_later(_HEADER_SECONDS, self.expire)
            self.make_room()

        def make_room(self) -> None:
            oldest = list(islice(anonymous, max(0, len(anonymous) - _ANONYMOUS)))
            for connection in oldest:
                if not connection.unread():
                    connection.drop()

        def unread(self) -> bool:
            poll = select.poll()
            poll.register(self.transport.get_extra_info("socket"), select.POLLIN)
            return self.silent and bool(poll.poll(0))

        def expire(self) -> None:
            if self.unread():
                anonymous[self] = self.loop.call_later(_HEADER_SECONDS, self.expire)
            else:
                self.drop()

        def drop(self) -> None:
            # `connection_lost` follows later, when others may have connected.
            anonymous.pop(self).cancel()
            self.connections.discard(self)
            self.transport.abort()

        def data_received(self, data: bytes) -> None:
            self.silent = False
            super().data_received(data)
            self.make_room()

        def handle_events(self) -> None:
            super().handle_events()
            if self in anonymous and self.scope is not None and guard.refusal(dict(self.scope)) is None:
                anonymous.pop(self).cancel()

        def send_400_response(self, msg: str) -> None:
            if self.cycle is not None:  # the request before the malformed bytes is not answered any more
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            with suppress(LocalProtocolError):  # its answer has begun
                super().send_400_response(msg)
            self.transport.close()

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
        server.listen(_ANONYMOUS)
    except OSError as error:
        server.close()
        reason = f"port {port} of {ADDRESS} cannot be used: {error.strerror}"
        raise InputError(f"{reason}; choose another with {option}") from None
    return server


def http_server(guard: Guard) -> Any:
    """A uvicorn server of `guard`. `run([listener])` serves until a signal ends the process, or until `should_exit` is set.
    Requests in progress then have a second and are cancelled."""
    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # An open page follows its server for as long as it can, so cancelling it is no error to report.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            await super().shutdown(sockets)

    return Server(
        uvicorn.Config(
            guard,
            log_level="error",  # any client could fill the terminal with warnings about malformed requests
            access_log=False,
            proxy_headers=False,
            server_header=False,
            ws="none",
            http=guarded_protocol(guard),
            loop="asyncio",
            limit_concurrency=_CONNECTIONS,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=1,
        )
    )
