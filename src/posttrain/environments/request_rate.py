"""A limit of requests per minute, for all threads that share a client."""

import threading
import time


class RequestRate:
    """Lets one request through every 60 / `per_minute` seconds; the others wait for their turn."""

    def __init__(self, per_minute: float) -> None:
        self._gap = 60 / per_minute
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self, *_: object) -> None:
        """Return when the next request may be sent."""
        with self._lock:
            now = time.monotonic()
            turn = max(now, self._next)
            self._next = turn + self._gap
        time.sleep(turn - now)
