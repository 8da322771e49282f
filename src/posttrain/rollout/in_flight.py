"""Episodes in flight that can be cancelled from another thread."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from posttrain.episode import Episode
from posttrain.rollout.driver import EpisodeRequest, RolloutWorker

POLL_SECONDS = 0.05
"""Interval of `InFlight.poll`, in seconds."""


class InFlight:
    """The episodes in flight of one event loop at a time."""

    def __init__(self) -> None:
        self.poll: Callable[[], None] | None = None
        """Called every `POLL_SECONDS` while episodes are in flight, for engines that compute in another process."""
        self._open: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._polling: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        """An exception that `poll` raised. It cancels the episodes, which raise it again."""
        self._stopped = False

    async def run(self, attempt: Callable[[], Coroutine[Any, Any, Episode]]) -> Episode:
        """The episode that `attempt` plays."""
        self._loop = asyncio.get_running_loop()
        if self._stopped:  # checked after the loop is set: a concurrent `stop` then sees either the loop or this check
            raise asyncio.CancelledError
        if self.poll is not None and (self._polling is None or self._polling.done()):
            self._polling = asyncio.create_task(self._poll_regularly(self.poll))
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            return await attempt()
        except asyncio.CancelledError:
            if self._failure is not None:
                raise self._failure from None
            raise
        finally:
            self._open.remove(task)

    def stop(self) -> None:
        """Cancel all episodes and refuse new ones. Thread-safe."""
        self._stopped = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is already closed
                self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks()])

    async def _poll_regularly(self, poll: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if not self._open:
                return
            try:
                poll()
            except Exception as error:
                self._failure = error
                for task in self._open:
                    task.cancel()
                return


@dataclass(frozen=True, kw_only=True)
class AsyncRolloutWorker(RolloutWorker):
    """A rollout worker whose episodes can be cancelled."""

    in_flight: InFlight = field(default_factory=InFlight)

    async def run_episode(self, request: EpisodeRequest) -> Episode:
        episode = await self.in_flight.run(partial(super().run_episode, request))
        versions = episode.versions
        episode.version = int(versions[0]) if len(versions) else self.version
        return episode
