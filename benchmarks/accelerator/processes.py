"""All processes that a part started, its children's children included."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

GRACE = 10.0
"""Seconds in which a part may clean up before it is killed."""
_SUBREAPER = 36


def descendants(pid: int) -> set[int]:
    """Process ids of the children of `pid`, of their children, and so on. Empty on systems without /proc."""
    children: dict[int, list[int]] = defaultdict(list)
    for file in Path("/proc").glob("[0-9]*/stat"):
        # A process may end between the listing and the reading.
        with suppress(OSError, ValueError, IndexError):
            children[int(file.read_text().rpartition(")")[2].split()[1])].append(int(file.parent.name))
    found: set[int] = set()
    new = [pid]
    while new:
        new = [child for parent in new for child in children[parent] if child not in found]
        found.update(new)
    return found


@contextmanager
def adopted_orphans() -> Iterator[None]:
    """Context manager in which processes whose parents end become children of this one, so `descendants` finds them."""
    if sys.platform != "linux":
        yield
        return
    library = ctypes.CDLL(None)
    library.prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        library.prctl(_SUBREAPER, 0, 0, 0, 0)


def kill(pids: Collection[int]) -> None:
    """Send SIGKILL to all processes that still exist, and wait up to `GRACE` seconds until they have ended."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    ends = time.monotonic() + GRACE
    while any(is_alive(pid) for pid in pids) and time.monotonic() < ends:
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether the process runs. False for one that has ended but whose parent has not read its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def end(process: "subprocess.Popen[bytes]", others: set[int]) -> None:
    """End `process`, the leader of its session, and all other descendants of this process except `others`.

    `process` gets SIGTERM first, so that it can clean up, and SIGKILL after `GRACE` seconds.
    """
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process that is blocked in a device driver does not end, even by SIGKILL.
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    ends = time.monotonic() + GRACE
    while (left := descendants(os.getpid()) - others - {process.pid}) and time.monotonic() < ends:
        kill(left)
        for pid in left:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)
