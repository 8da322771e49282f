"""Writing files whole or not at all, and turning the disk's refusals into messages."""

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.errors import RunError

PARTIAL = re.compile(r"^\..+\.(\d+)\.partial$")
"""Name of a file (or directory) being written, with the id of the process that writes it."""

_HIDDEN = re.compile(r"\(os error (\d+)\)")
"""How safetensors tells the errno of a refused write."""

_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EACCES: "permission denied; make it writable or choose another `runs`",
    errno.EPERM: "permission denied; make it writable or choose another `runs`",
    errno.EROFS: "the file system is read-only; choose another `runs`",
    errno.EMFILE: "too many open files; raise `ulimit -n`",
}


def partial_path(path: Path) -> Path:
    """Where this process writes `path` before it is renamed: beside it, so that the rename is atomic."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Raise `RunError` naming `path` and the remedy for everything inside the block that the disk refuses."""
    try:
        yield
    except Exception as error:
        reason = refusal(error)
        if reason is None:
            raise
        raise RunError(f"cannot write {path}: {reason}, then go on with `--resume`") from error


def refusal(error: BaseException) -> str | None:
    """Why the disk refused a write and what to do; None for errors that are not the disk's.

    Weights are written by libraries that raise errors of their own: safetensors hides the errno in its text, and
    torch's archive writer tells nothing but that fewer bytes arrived than it wrote.
    """
    if isinstance(error, OSError):
        return _REMEDIES.get(error.errno or 0, f"{error.strerror or error}; check the path and the disk")
    if hidden := _HIDDEN.search(str(error)):
        number = int(hidden[1])
        return _REMEDIES.get(number, f"{os.strerror(number)}; check the path and the disk")
    if isinstance(error, RuntimeError) and "inline_container" in str(error):
        return "the file did not take all bytes, as on a full disk; free some space"
    return None


def sync_directory(path: Path) -> None:
    """Make renames inside the directory `path` survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes | str | Iterable[bytes]) -> None:
    """Write `content` (text as UTF-8, or pieces one at a time) to `path` so that the name holds the old or the new
    content, never a part.

    Written aside, fsynced, renamed; the directory is fsynced last. Raises `RunError` when the disk refuses; then
    `path` is as it was.
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
