"""How threads wait for each other: awake while processors are free, asleep where other processes need them.

Waking a sleeping thread takes about 0.2 ms in a virtual machine, as long as a small product, so by default libgomp lets
threads that wait stay awake for milliseconds. Where other processes are busy, that occupies the processor which the
awaited thread needs, and training becomes several times slower. libgomp shortens the wait to microseconds while it manages
more threads than there are processors (its manual, GOMP_SPINCOUNT). So a thread watches how long
the threads of this process wait for a processor, and while that is long, it holds more threads, which sleep. The number of
threads that compute, and with it every result, stays the same.
"""

import math
import os
import threading
import time
from pathlib import Path

import torch

from posttrain.runs.machine import usable_processors

SHARED = 0.2
"""Seconds a second for which ready threads of this process wait for a processor, from which the processors are shared: at
most 0.1 where no other process is busy, and at least 0.38 beside one."""
INTERVAL, QUIET = 0.5, 4
"""Seconds between looks, and the number of looks in turn without waiting after which threads stay awake again."""
CHOSEN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Environment variables by which a user chooses how threads wait."""

TASKS = Path("/proc/self/task")

_started = threading.Event()


def wait_by_load() -> None:
    """Start the watching thread of this process, once; only on Linux, with several threads, and if the user has not chosen."""
    chosen = torch.get_num_threads() == 1 or any(name in os.environ for name in CHOSEN)
    if TASKS.is_dir() and not chosen and not _started.is_set():
        _started.set()
        threading.Thread(target=_watch, name="waiting", daemon=True).start()


class Crowd:
    """Sleeping threads that OpenMP counts as its own, more than there are processors. One that has none is falsy."""

    def __init__(self) -> None:
        self._leave = threading.Event()
        self._threads: list[threading.Thread] = []

    def __bool__(self) -> bool:
        return bool(self._threads)

    def gather(self) -> None:
        """Start as many threads as are missing. Each has a pool of its own."""
        others = torch.get_num_threads() - 1
        missing = math.ceil((len(usable_processors()) - others) / others) if others else 0
        ready = threading.Barrier(missing + 1)
        self._leave.clear()
        self._threads = [threading.Thread(target=self._stay, args=(ready,), daemon=True) for _ in range(missing)]
        for thread in self._threads:
            thread.start()
        ready.wait()

    def leave(self) -> None:
        """End them."""
        self._leave.set()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _stay(self, ready: threading.Barrier) -> None:
        torch.zeros(torch.get_num_threads() << 16, dtype=torch.uint8).add_(1)  # a parallel loop starts the pool
        ready.wait()
        self._leave.wait()


def _watch() -> None:
    crowd, quiet = Crowd(), 0
    waited, now = waiting(), time.monotonic()
    while True:
        time.sleep(INTERVAL)
        before, began = waited, now
        waited, now = waiting(), time.monotonic()
        quiet = quiet + 1 if (waited - before) / (now - began) < SHARED else 0
        if not quiet and not crowd:
            crowd.gather()
        elif quiet >= QUIET and crowd:
            crowd.leave()


def waiting() -> float:
    """Seconds for which ready threads of this process have waited for a processor; 0 if the system does not count them."""
    total = 0
    for task in TASKS.iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            continue  # a thread that has ended meanwhile, or a kernel that does not count
    return total / 1e9
