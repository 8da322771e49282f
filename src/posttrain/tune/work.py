"""Runs side by side, as many at a time as there are workers."""

from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Protocol

from posttrain.training.interrupt import Interrupts
from posttrain.tune.attempt import Attempt

_SECONDS = 0.25
"""Between two looks at the metrics of the runs."""


class Job(Protocol):
    """A run and what is to be done with what it measures."""

    attempt: Attempt

    def begin(self, device: str | None) -> None:
        """Start the run, unless it is finished or given up."""
        ...

    def follow(self) -> None:
        """Look at what the run has measured since."""
        ...

    def end(self) -> None:
        """The process has ended, or never began."""
        ...


def work(take: Callable[[], Job | None], workers: int, devices: Sequence[str]) -> None:
    """Run what `take` gives until it gives nothing and nothing runs.

    `take` is asked again whenever a worker is free. Ctrl-C and SIGTERM ask the runs to save and stop, wait for them,
    and then raise KeyboardInterrupt; so does every error, with the error.
    """
    active: dict[int, Job] = {}
    with Interrupts() as interrupts:
        try:
            while True:
                with interrupts.critical():
                    _fill(active, take, workers, devices)
                if not active:
                    return
                sentinels = [job.attempt.sentinel for job in active.values() if job.attempt.running]
                if len(sentinels) == len(active):
                    wait(sentinels, timeout=_SECONDS)
                with interrupts.critical():
                    for place, job in list(active.items()):
                        ended = not job.attempt.running
                        job.follow()
                        if ended:
                            job.end()
                            del active[place]
        except BaseException:
            _stop_all([job.attempt for job in active.values()])
            raise


def _fill(active: dict[int, Job], take: Callable[[], Job | None], workers: int, devices: Sequence[str]) -> None:
    while len(active) < workers:
        job = take()
        if job is None:
            return
        place = next(place for place in range(workers) if place not in active)
        active[place] = job
        job.begin(devices[place % len(devices)] if devices else None)


def _stop_all(attempts: Sequence[Attempt]) -> None:
    for attempt in attempts:
        attempt.stop()
    for attempt in attempts:
        while attempt.running:
            wait([attempt.sentinel], timeout=_SECONDS)
