"""Episodes in flight that can be begun again, or given up from another thread."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from posttrain.episode import Episode
from posttrain.rollout.driver import EpisodeRequest, RolloutWorker

POLL_SECONDS = 0.05
"""How often it is looked for newer weights where the engine does not say when it could take them."""


class InFlight:
    """The episodes that are being played, in one event loop at a time."""

    def __init__(self) -> None:
        self.poll: Callable[[], None] | None = None
        """Called again and again while episodes are in flight, for engines that compute elsewhere."""
        self.restarts = 0
        """Episodes begun again so far."""
        self._open: dict[asyncio.Task[Any], EpisodeRequest] = {}
        self._given_up: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        """What `watch` raised: nobody else would hear of it."""
        self._stopped = False

    async def run(self, place: EpisodeRequest, attempt: Callable[[], Coroutine[Any, Any, Episode]]) -> Episode:
        """The episode that `attempt` plays, begun anew as often as `restart_all` asks for it."""
        self._loop = asyncio.get_running_loop()
        if self._stopped:  # looked at after the loop is known, so that a `stop` meanwhile misses neither
            raise asyncio.CancelledError
        if self.poll is not None and (self._watching is None or self._watching.done()):
            self._watching = asyncio.create_task(self._look(self.poll))
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = place
        try:
            while True:
                # Begun anew in the same breath: the engine waits for it as if it had never been given up.
                try:
                    return await attempt()
                except asyncio.CancelledError:
                    if self._failure is not None:
                        raise self._failure from None
                    if self._stopped or task not in self._given_up:
                        raise
                    self._given_up.remove(task)
                    task.uncancel()
                    self.restarts += 1
        finally:
            del self._open[task]

    def restart_all(self) -> list[EpisodeRequest]:
        """Give up what is in flight and begin it anew; returns the places of those episodes.

        They draw the same random numbers again. With fresh ones, those that are long would be given up more often than
        those that are short, and be replaced by what is shorter on average.
        """
        places = list(self._open.values())
        for task in self._open:
            if task not in self._given_up:
                self._given_up.add(task)
                task.cancel()
        return places

    def stop(self) -> None:
        """From another thread: end the event loop that plays, and let no other begin."""
        self._stopped = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(_cancel_all)

    async def _look(self, watch: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if not self._open:
                return
            try:
                watch()
            except Exception as error:
                self._failure = error
                for task in self._open:
                    task.cancel()
                return


def _cancel_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


@dataclass(frozen=True)
class AsyncRolloutWorker(RolloutWorker):
    """A player whose episodes can be begun again."""

    in_flight: InFlight = field(default_factory=InFlight)

    async def run_episode(self, place: EpisodeRequest) -> Episode:
        episode = await self.in_flight.run(place, partial(super().run_episode, place))
        own = episode.versions
        episode.version = int(own[0]) if len(own) else self.version
        return episode
