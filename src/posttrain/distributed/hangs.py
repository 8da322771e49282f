"""Hang detection between the learner processes of a run, which otherwise wait for each other without a limit.

Each process reports to the store of the run, from a thread, that it responds, whether it is blocked in a collective call, and
at which line its main thread is. A hang is a process that reports nothing, or all processes blocked. A process that works for
long is named, but not ended: nothing distinguishes an endless loop from a long rollout.
NCCL has a time-out for its kernels, which wait for each other while the main threads wait for their GPUs. Ray workers have
`distributed.ray.monitor`.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

LIMIT = 600.0
"""Seconds without a report, or in which all processes are blocked, after which the run ends. Longer than any collective call
or forward pass."""
GRACE = 90.0
"""Seconds that a process has to end after another one failed, if it still waits for it: that process may go on, outside of the run."""
FAILED = "posttrain/failure"
"""Key in the store: the first process that failed, which reports its error."""
_PACKAGE = Path(__file__).parents[1]
_CALLS = {"world.py", "ray"}
"""Files and folders of the package with calls to other processes."""

progress = [0]
"""The number of collective calls and forward passes that this process has started."""


def place_of(thread: int) -> tuple[str, bool]:
    """The line that the thread, or the one whose end it waits for, executes, and whether it is in a collective call.

    It is the innermost line of the package outside of `_CALLS`, else of any file.
    """
    frame: Any = sys._current_frames().get(thread)
    frames = []
    while frame is not None:
        if frame.f_code is threading.Thread.join.__code__:
            return place_of(frame.f_locals["self"].ident)
        frames.append((Path(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    if not frames:
        return "its end", False
    ours = [place for place in frames if place[0].is_relative_to(_PACKAGE) and not _CALLS & {*place[0].parts}]
    file, line, name = (ours or frames)[0]
    torch = takewhile(lambda parts: "torch" in parts, (place[0].parts for place in frames))
    call = next((parts for parts in torch if ("torch", "distributed") in pairwise(parts)), ("checkpoint",))
    inside = "checkpoint" not in call  # writing one may take longer than the limit
    return f"{file.relative_to(_PACKAGE) if ours else file.name}:{line} ({name})", inside


def find_hang(reports: dict[int, dict[str, Any]], now: float, rank: int) -> str | None:
    """What hangs by the `reports` of all processes, seen by process `rank` at `now`, or None.

    A report has `beat` and `moves`, which count, the seconds `beat_at` and `moved_at` when `rank` saw them change, `blocked`
    and `line`.
    """
    for other, report in reports.items():
        if other != rank and now - report["beat_at"] > LIMIT:
            return (
                f"process {other} of the run has not responded for {now - report['beat_at']:.0f} s, last at {report['line']}; "
                "look at its machine, then continue with --resume"
            )
    heard = all(now - report["beat_at"] < LIMIT / 2 for report in reports.values())
    if heard and all(report["blocked"] and now - report["moved_at"] > LIMIT for report in reports.values()):
        lines = ", ".join(f"process {other} at {report['line']}" for other, report in sorted(reports.items()))
        return f"the processes of the run have waited for each other for {LIMIT:.0f} s: {lines}; continue with --resume"
    return None


def find_wait(reports: dict[int, dict[str, Any]], now: float, rank: int) -> str | None:
    """What process `rank`, the first that waits for longer than the limit, waits for, if others work; else None."""
    busy = [f"process {other} is at {report['line']}" for other, report in reports.items() if not report["blocked"]]
    waits = [other for other, report in reports.items() if report["blocked"] and now - report["moved_at"] > LIMIT]
    if not busy or rank not in waits[:1]:
        return None
    return f"process {rank} has waited for {LIMIT:.0f} s at {reports[rank]['line']}; {', '.join(busy)}"


def end(message: str) -> None:
    """Print the message. A process that `launch` started also records it (`cli.process`)."""
    print(message, file=sys.stderr, flush=True)


on_hang: list[Callable[[str], None]] = [end]
"""What the process that reports a hang calls with the message before it exits."""


@contextmanager
def watched(store: Any, rank: int, size: int) -> Iterator[None]:
    """Watch the `size` processes that share `store` inside the block. A hang ends this process, because a main thread that
    waits in a collective call cannot be interrupted."""
    store, main, stopped = store.clone(), threading.current_thread().ident or 0, threading.Event()
    reports: dict[int, dict[str, Any]] = {}

    def watch() -> None:
        beat, calls, moves, last, failed_at, waits = 0, -1, 0, time.monotonic(), None, False
        while not stopped.wait(min(5.0, LIMIT / 10)):
            beat += 1
            line, blocked = place_of(main)
            # A call between two reports counts as progress, so a blocked process has the same count twice.
            blocked, calls = blocked and calls == progress[0], progress[0]
            moves += not blocked
            store.set(f"hangs/{rank}", json.dumps({"beat": beat, "moves": moves, "blocked": blocked, "line": line}))
            now = time.monotonic()
            if now - last > LIMIT / 2:  # this process was stopped, and perhaps all were
                reports.clear()
            last = now
            for other in range(size):
                key = f"hangs/{other}"
                report = (
                    json.loads(store.get(key)) if store.check([key]) else {"beat": 0, "moves": 0, "line": "its start"}
                )
                before = reports.get(other, {"beat_at": now, "moved_at": now})
                for count, at in (("beat", "beat_at"), ("moves", "moved_at")):
                    report[at] = now if report[count] != before.get(count) else before[at]
                reports[other] = {"blocked": False} | report
            failed_at = failed_at or (now if store.check([FAILED]) else None)
            if failed_at is not None and now - failed_at > GRACE and not stopped.is_set():
                print(f"process {rank} ends at {line}: another one has failed", file=sys.stderr, flush=True)
                os._exit(1)
            told, sentence = waits, find_wait(reports, now, rank)
            if (waits := sentence is not None) and not told:
                print(sentence, file=sys.stderr, flush=True)
            if (message := find_hang(reports, now, rank)) is not None and not stopped.is_set():
                if store.compare_set("hangs/reported", "", str(rank)) == str(rank).encode():
                    for function in on_hang:
                        function(message)
                else:
                    time.sleep(2.0)  # until the other process has reported
                os._exit(1)

    def guarded() -> None:
        try:
            watch()
        except Exception as error:  # the process that hosts the store has exited, which ends collective calls
            print(f"hang detection has stopped: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=guarded, name="hang detection", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(timeout=5)
