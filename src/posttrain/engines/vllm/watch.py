"""An engine that hangs without dying, noticed."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from posttrain.engines.vllm.replica import Died, Refused

T = TypeVar("T")


class Watch:
    """Asks an engine for a sign of life as long as anything is asked of it.

    How long an answer takes says nothing, so no request has a time-out of its own.
    """

    def __init__(self, respond: Callable[[], Awaitable[None]], seconds: float) -> None:
        """`respond` returns once the engine has; one that does not for `seconds` hangs."""
        self._respond = respond
        self._seconds = seconds
        self._waiting: set[asyncio.Future[Any]] = set()
        self._given_up: set[asyncio.Future[Any]] = set()

    async def over(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is asked of the engine; Died where the engine hangs."""
        task = asyncio.ensure_future(work)
        self._waiting.add(task)
        if len(self._waiting) == 1:
            self._looking = asyncio.ensure_future(self._look())
        try:
            return await task
        except asyncio.CancelledError:
            if task in self._given_up:
                raise Died(f"it gave no sign of life for {self._seconds:g} s") from None
            raise
        finally:
            self._waiting.discard(task)
            self._given_up.discard(task)
            if not self._waiting:
                self._looking.cancel()

    async def _look(self) -> None:
        """Look until it is cancelled, when nothing is asked any more."""
        while True:
            await asyncio.sleep(self._seconds / 4)
            asked = set(self._waiting)
            try:
                async with asyncio.timeout(3 * self._seconds / 4):
                    await self._respond()
            except TimeoutError:
                self._given_up = asked & self._waiting
                for task in self._given_up:
                    task.cancel()
            except (Died, Refused):
                # Those who ask find out themselves.
                pass
