"""Limits of the HTTP client of a server: a time-out for each request as a whole, and no redirects to other origins.

The package `openai` uses clients of httpx or, since its version 3, of httpx2. Both apply a time-out to each read of a
connection, so a server that sends a byte now and then can keep a request open for hours.
"""

import importlib
import math
import threading
import time
from collections.abc import Callable
from typing import Any


class RedirectRefused(ValueError):
    """A server redirected to another server."""


def bounded(client: Any) -> Any:
    """Bound the requests of `client`, an httpx client, and return it.

    A request ends when the read time-out of its settings has passed since it started, even if headers or body are
    incomplete. Connecting has a separate time-out, and its time counts towards the limit. A redirect to another scheme,
    host or port raises RedirectRefused.
    """
    deadline = _Deadline()
    for transport in (client._transport, *client._mounts.values()):
        pool = getattr(transport, "_pool", None)  # a mount of None stands for a host without a proxy
        if pool is not None:
            pool._network_backend = _Backend(pool._network_backend, deadline)
    hooks = client.event_hooks
    client.event_hooks = {
        "request": [*hooks["request"], deadline.start],
        "response": [*hooks["response"], _refuse_other_origins],
    }
    return client


def _refuse_other_origins(response: Any) -> None:
    if response.has_redirect_location:
        source = response.request.url
        target = source.join(response.headers["location"])
        if (target.scheme, target.host, target.port) != (source.scheme, source.host, source.port):
            raise RedirectRefused(
                f"redirects to {target.scheme}://{target.netloc.decode()}, which is not followed; set the url to the server that answers"
            )


class _Deadline(threading.local):
    """Deadline of the request of this thread. Threads share connections, each of which is used by one thread at a
    time.
    """

    at = math.inf

    def start(self, request: Any) -> None:
        seconds = request.extensions.get("timeout", {}).get("read")
        self.at = math.inf if seconds is None else time.monotonic() + seconds

    def left(self, timeout: float | None, error: Callable[[str], Exception]) -> float | None:
        """`timeout`, or the time left until the deadline if that is less."""
        if self.at == math.inf:
            return timeout
        left = self.at - time.monotonic()
        if left <= 0:
            raise error("the request exceeded its time-out")
        return left if timeout is None else min(timeout, left)


class _Backend:
    """A network backend of httpcore whose streams have the deadline."""

    def __init__(self, inner: Any, deadline: _Deadline) -> None:
        self._inner, self._deadline = inner, deadline

    def connect_tcp(self, *args: Any, **kwargs: Any) -> Any:
        return _Stream(self._inner.connect_tcp(*args, **kwargs), self._deadline)

    def connect_unix_socket(self, *args: Any, **kwargs: Any) -> Any:
        return _Stream(self._inner.connect_unix_socket(*args, **kwargs), self._deadline)

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


class _Stream:
    """A connection of httpcore: each read and write ends at the deadline."""

    def __init__(self, inner: Any, deadline: _Deadline) -> None:
        self._inner, self._deadline = inner, deadline
        errors = importlib.import_module(type(inner).__module__.partition(".")[0])
        self._read_timeout, self._write_timeout = errors.ReadTimeout, errors.WriteTimeout

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, timeout=self._deadline.left(timeout, self._read_timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, timeout=self._deadline.left(timeout, self._write_timeout))

    def start_tls(self, *args: Any, **kwargs: Any) -> Any:
        return _Stream(self._inner.start_tls(*args, **kwargs), self._deadline)

    def close(self) -> None:
        self._inner.close()

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
