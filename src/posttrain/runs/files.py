"""Atomic file writes, and storage errors as messages with a remedy."""

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.errors import RunError

PARTIAL = re.compile(r"^\..+\.(\d+)\.partial$")
"""Name of a file or directory that is being written, with the id of the writing process."""

_ERRNO_TEXT = re.compile(r"\(os error (\d+)\)")
"""How safetensors reports the errno of a failed write."""

_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EACCES: "permission denied; make it writable or choose another `runs`",
    errno.EPERM: "permission denied; make it writable or choose another `runs`",
    errno.EROFS: "the file system is read-only; choose another `runs`",
    errno.EMFILE: "too many open files; raise `ulimit -n`",
}


def partial_path(path: Path) -> Path:
    """Temporary path for writing `path`, in the same directory, so that the rename is atomic."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Convert storage errors inside the block to `RunError` with `path` and a remedy."""
    try:
        yield
    except Exception as error:
        reason = storage_error(error)
        if reason is None:
            raise
        raise RunError(f"cannot write {path}: {reason}, then continue with `--resume`") from error


def storage_error(error: BaseException) -> str | None:
    """Cause and remedy of a failed write; None if `error` is not a storage error.

    Libraries that write weights raise errors of their own: safetensors gives the errno only in the message, and the
    archive writer of torch reports only that fewer bytes were stored than written.
    """
    if isinstance(error, OSError):
        return _REMEDIES.get(error.errno or 0, f"{error.strerror or error}; check the path and the disk")
    if match := _ERRNO_TEXT.search(str(error)):
        number = int(match[1])
        return _REMEDIES.get(number, f"{os.strerror(number)}; check the path and the disk")
    if isinstance(error, RuntimeError) and "inline_container" in str(error):
        return "not all bytes could be stored, probably because the disk is full; free some space"
    return None


def sync_directory(path: Path) -> None:
    """Fsync the directory `path`, so that renames in it survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes | str | Iterable[bytes]) -> None:
    """Atomically replace the content of `path` with `content` (bytes, text as UTF-8, or an iterable of bytes).

    The content goes to a temporary file, which is fsynced and renamed; then the directory is fsynced. Raises
    `RunError` if writing fails, and leaves `path` unchanged.
    """
    pieces = [content.encode()] if isinstance(content, str) else [content] if isinstance(content, bytes) else content
    aside = partial_path(path)
    with storage_errors(path):
        try:
            with open(aside, "wb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def process_runs(pid: int) -> bool:
    """Whether a process with this id exists on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
