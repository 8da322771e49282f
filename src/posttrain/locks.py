"""Exclusive locks of open files. The system releases a lock when its file is closed, also by the end of the process."""

import errno
import os
import time

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

_BYTE = 2**30
"""Where Windows, which forbids to read what is locked, locks one byte: beyond the contents of any file that is locked."""


def lock(descriptor: int, wait: bool = False) -> None:
    """Lock the file, which may be locked already by this process.

    Raises BlockingIOError if another process has locked it, unless `wait`; another OSError if it cannot be locked.
    """
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return
    while not _windows(descriptor, "LK_NBLCK"):
        if not wait:
            raise BlockingIOError(errno.EAGAIN, "another process has locked the file")
        time.sleep(0.05)


def unlock(descriptor: int) -> None:
    """Release the lock of an open file."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    else:
        _windows(descriptor, "LK_UNLCK")


def _windows(descriptor: int, what: str) -> bool:
    """Whether `what` was done to the lock; the position in the file stays."""
    import msvcrt

    before = os.lseek(descriptor, 0, os.SEEK_CUR)
    os.lseek(descriptor, _BYTE, os.SEEK_SET)
    try:
        msvcrt.locking(descriptor, getattr(msvcrt, what), 1)  # type: ignore[attr-defined]
    except PermissionError:
        return False
    finally:
        os.lseek(descriptor, before, os.SEEK_SET)
    return True
