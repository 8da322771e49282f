"""The append-only file of lines that keeps metrics, completions, sampled episodes, judgments and changes of a vault."""

import fcntl
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from posttrain.runs.directory import storage_errors, sync_directory, write_atomically

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A link in a run of someone else must not lead to another file."""
_BLOCK = 1 << 16


class LineLog:
    """A file of lines that end with a newline, to which lines are appended. A context manager.

    A line reaches the operating system before `append` returns, whole or not at all, so a killed process loses none. `lines`
    skips the incomplete last line that a power failure leaves, and `cut` removes it. Storage errors are `RunError`s.
    """

    def __init__(self, path: Path, descriptor: int | None = None, sync_seconds: float | None = math.inf) -> None:
        """Open the log at `path`, which is created if missing.

        descriptor: the log, if it is open already; `path` then only names it.
        sync_seconds: least time between two fsyncs, in seconds, of which a power failure may lose the lines. 0: a line
            is on disk when `append` returns. Infinite: only `close` syncs. None: nothing does.
        """
        self.path = path
        self._sync_seconds = sync_seconds
        self._synced = time.monotonic()
        with storage_errors(path):
            self._descriptor = os.open(path, _FLAGS, 0o644) if descriptor is None else descriptor
            if descriptor is None and self.size == 0 and sync_seconds is not None:
                sync_directory(path.parent)

    def __enter__(self) -> "LineLog":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._descriptor).st_size

    @property
    def torn(self) -> bool:
        """Whether the last line is incomplete."""
        size = self.size
        return size > 0 and self.read(size - 1, size) != b"\n"

    def lines(self, start: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield the complete lines from byte `start` on, each after the offset at which it ends."""
        with open(os.dup(self._descriptor), "rb") as file:
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                start += len(line)
                yield start, line

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop`."""
        return os.pread(self._descriptor, stop - start, start)

    def append(self, line: bytes, sync: bool = False) -> int:
        """Append a line, which ends with a newline; returns the offset at which it ends. `sync`: fsync now."""
        start = end = self.size
        with storage_errors(self.path):
            try:
                view = memoryview(line)
                while view:
                    written = os.pwrite(self._descriptor, view, end)
                    view, end = view[written:], end + written
                if sync or (self._sync_seconds is not None and time.monotonic() - self._synced >= self._sync_seconds):
                    self.sync()
            except OSError:
                os.ftruncate(self._descriptor, start)
                raise
        return end

    def cut(self) -> None:
        """Remove an incomplete last line."""
        end, newline = self.size, -1
        while end > 0 and newline < 0:
            start = max(0, end - _BLOCK)
            newline = self.read(start, end).rfind(b"\n")
            end = start if newline < 0 else start + newline + 1
        self.truncate(end)

    def truncate(self, size: int) -> None:
        """Drop all bytes after the first `size`."""
        with storage_errors(self.path):
            if self.size != size:
                os.ftruncate(self._descriptor, size)

    def replace(self, lines: Iterable[bytes]) -> None:
        """Atomically replace all lines."""
        os.close(self._descriptor)
        self._descriptor = -1
        write_atomically(self.path, lines)
        with storage_errors(self.path):
            self._descriptor = os.open(self.path, _FLAGS, 0o644)

    def sync(self) -> None:
        """Fsync the file."""
        os.fsync(self._descriptor)
        self._synced = time.monotonic()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold an exclusive lock of the file; other processes wait. A file system without locks has none."""
        with suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Sync and close the file; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        try:
            if self._sync_seconds is not None:
                with storage_errors(self.path):
                    os.fsync(descriptor)
        finally:
            os.close(descriptor)
