"""Limits of the HTTP client of a server: a time-out for each request as a whole, a size of each response, and no
redirects to other origins.

The package `openai` uses clients of httpx or, since its version 3, of httpx2. Both apply a time-out to each read of a
connection, so a server that sends a byte now and then can keep a request open for hours.
"""

import importlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

RESPONSE_MIB = 16
"""Largest response in MiB: many times that of a long answer."""
_FIRST = "posttrain.first"
"""Extension of a request with the address and the deadline of the request that was redirected to it, or its own."""


class ResponseRefused(ValueError):
    """A server redirected to another server, or sent a response that is too large or compressed."""


def bounded(client: Any, response_mib: int = RESPONSE_MIB) -> Any:
    """Bound the requests of `client`, an httpx client, and return it.

    A request ends when the read time-out of its settings has passed since it started, even if headers or body are
    incomplete. Connecting has a separate time-out, and its time counts towards the limit. A redirect to another scheme,
    host or port raises ResponseRefused, and so does a response with more than `response_mib` MiB of headers and body.
    Responses are requested without compression and refused with it: a few megabytes can expand to any size.
    """
    limits = _Limits(response_mib)
    for transport in (client._transport, *client._mounts.values()):
        pool = getattr(transport, "_pool", None)  # a mount of None stands for a host without a proxy
        if pool is not None:
            pool._network_backend = _Backend(pool._network_backend, limits)
    client.headers["accept-encoding"] = "identity"
    for event, hook in (("request", limits.start), ("response", _refuse_compression)):
        client.event_hooks = client.event_hooks | {event: [*client.event_hooks[event], hook]}
    return client


def bounded_async() -> Any:
    """A client of httpx2 for MCP servers, whose responses have the same limits; events of a stream have their own."""
    import httpx2

    class Limited(httpx2.AsyncByteStream):
        def __init__(self, inner: Any) -> None:
            self.inner, self.limits = inner, _Limits(RESPONSE_MIB)

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for part in self.inner:
                yield self.limits.count(part)

        async def aclose(self) -> None:
            await self.inner.aclose()

    async def limit(response: Any) -> None:
        _refuse_compression(response)
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            response.stream = Limited(response.stream)

    return httpx2.AsyncClient(timeout=300, headers={"accept-encoding": "identity"}, event_hooks={"response": [limit]})


def _refuse_compression(response: Any) -> None:
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("identity", ""):
        raise ResponseRefused(f"sends a response that is compressed ({encoding[:40]!r}), which was not requested")


class _Limits(threading.local):
    """Deadline and remaining size of this thread's request. Threads share connections, one at a time."""

    def __init__(self, response_mib: int) -> None:
        self._mib = response_mib
        self._deadline = math.inf
        self._bytes = response_mib << 20

    def start(self, request: Any) -> None:
        """Called before each request and each request that follows a redirect, which has the extensions of the first."""
        seconds = request.extensions.get("timeout", {}).get("read")
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        url = request.url
        first, self._deadline = request.extensions.setdefault(_FIRST, (url, deadline))
        self._bytes = self._mib << 20
        if (url.scheme, url.host, url.port) != (first.scheme, first.host, first.port):
            raise ResponseRefused(
                f"redirects to {url.scheme}://{url.netloc.decode()}, which is not followed; set the url to the server that answers"
            )

    def time_left(self, timeout: float | None, error: Callable[[str], Exception]) -> float | None:
        """`timeout`, or the time left until the deadline if that is less."""
        if self._deadline == math.inf:
            return timeout
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise error("the request exceeded its time-out")
        return left if timeout is None else min(timeout, left)

    def count(self, received: bytes) -> bytes:
        """Return `received`; ResponseRefused if the response exceeds its size."""
        self._bytes -= len(received)
        if self._bytes < 0:
            raise ResponseRefused(f"sends a response of more than {self._mib} MiB")
        return received


class _Backend:
    """A network backend of httpcore whose streams have the limits."""

    def __init__(self, inner: Any, limits: _Limits) -> None:
        self._inner, self._limits = inner, limits

    def connect_tcp(self, *args: Any, **kwargs: Any) -> Any:
        return _Stream(self._inner.connect_tcp(*args, **kwargs), self._limits)

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


class _Stream:
    """A connection of httpcore: each read and write ends at the deadline, and reads are counted."""

    def __init__(self, inner: Any, limits: _Limits) -> None:
        self._inner, self._limits = inner, limits
        errors = importlib.import_module(type(inner).__module__.partition(".")[0])
        self._read_timeout, self._write_timeout = errors.ReadTimeout, errors.WriteTimeout

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        left = self._limits.time_left(timeout, self._read_timeout)
        return self._limits.count(self._inner.read(max_bytes, timeout=left))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, timeout=self._limits.time_left(timeout, self._write_timeout))

    def start_tls(self, *args: Any, **kwargs: Any) -> Any:
        return _Stream(self._inner.start_tls(*args, **kwargs), self._limits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # closing and information
