"""Ctrl-C and SIGTERM: at once while nothing can be spoilt, after the update while weights are changing.

Several processes stop together: a signal to any of them is held back until all of them are at the end of a critical
block, since none of them can go on, or save, without the others.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from posttrain.distributed.world import current


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop. A KeyboardInterrupt, so that asyncio lets it through."""


class Interrupts:
    """Turns SIGINT and SIGTERM into `Interrupted`, held back inside `critical()`. A second signal is not held back."""

    def __init__(self) -> None:
        self._world = current()
        self._together = self._world.size > 1
        self._critical = False
        self._requested: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def critical(self) -> Iterator[None]:
        """Finish the block first, then stop if that was asked for."""
        self._critical = True
        try:
            yield
        finally:
            self._critical = False
        requested, self._requested = self._requested, None
        if self._together:
            requested = next(iter(self._world.gather([requested] if requested is not None else [])), None)
        if requested is not None:
            raise Interrupted(signal.Signals(requested).name)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if (self._critical or self._together) and self._requested is None:
            self._requested = number
            return
        raise Interrupted(signal.Signals(number).name)
