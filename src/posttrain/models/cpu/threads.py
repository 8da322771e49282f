"""The number of threads to use while other processes are busy.

Every parallel loop waits for its last thread. If other processes occupy the processors, a thread is often suspended for
milliseconds while the others wait. Fewer threads are then faster.
"""

import os
import time
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import silu

from posttrain.runs.machine import usable_processors

RUNNING = Path("/proc/loadavg")
SAMPLES, INTERVAL = 30, 0.01
"""How often running processes are counted, and the seconds between counts."""
ROUNDS = 5
LIMIT = 3.0
"""Seconds after which the comparison ends."""
ROWS = (16, 256)
"""Rows of the products that are timed: those of decoding and those of training."""
GAIN = 1.1
"""All threads are used if fewer are not faster by this factor."""


def busy_processors() -> float:
    """The number of other threads of this machine that run or wait for a processor: median over 0.3 s. 0 if unknown."""
    counts = []
    try:
        for _ in range(SAMPLES):
            running = RUNNING.read_text().split()[3].partition("/")[0]
            counts.append(int(running) - 1)
            time.sleep(INTERVAL)
    except (OSError, ValueError, IndexError):
        return 0.0
    return float(median(counts))


def threads_beside(busy: float) -> int | None:
    """The number of threads to use while `busy` other threads run; None keeps torch's number.

    If not enough processors are free, a short computation is timed alternately with all threads and with one for each
    free processor. OMP_NUM_THREADS, if set, is kept.

    `busy` counts the whole machine. If this process may use only some of its processors, the busy threads may be on
    these or on others, so all are subtracted, and the comparison decides.
    """
    every = torch.get_num_threads()
    free = max(1, int(len(usable_processors()) - busy))
    if free >= every or "OMP_NUM_THREADS" in os.environ:
        return None
    try:
        fewer_is_faster = faster(free, every)
    finally:
        torch.set_num_threads(every)
    return free if fewer_is_faster else None


def faster(fewer: int, every: int) -> bool:
    """Whether a short computation with `fewer` threads is faster than with `every` thread, by `GAIN`."""
    inputs = [torch.ones(rows, 576) for rows in ROWS]
    weight = torch.full((1536, 576), 0.01)
    seconds: dict[int, list[float]] = {fewer: [], every: []}
    began = time.perf_counter()
    for turn in range(ROUNDS + 1):
        for count, times in seconds.items():
            torch.set_num_threads(count)
            start = time.perf_counter()
            for _ in range(8):
                for x in inputs:
                    silu(x @ weight.t()) @ weight
            if turn:  # the first turn starts threads
                times.append(time.perf_counter() - start)
        if turn and time.perf_counter() - began > LIMIT:
            break
    return median(seconds[fewer]) * GAIN < median(seconds[every])
