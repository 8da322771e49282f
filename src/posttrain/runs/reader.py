"""Reads the files of run directories, which may come from someone else.

Only regular files are read, and no link is followed below the run: a pipe or a device cannot block a command or fill its
memory, and no text from elsewhere gets into a page or a report. Sizes, lines and numbers are bounded.
"""

import errno
import json
import math
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from posttrain.errors import InputError

LONGEST_LINE = 4 << 20
"""Bytes of the longest line of a log."""
LARGEST = 1 << 30
"""Bytes of the largest file that is read as a whole or line by line."""
_LARGEST_DOCUMENT = 16 << 20
"""Bytes of the largest file that is parsed as one document, unless the caller says otherwise."""
_LONGEST_NUMBER = 40
"""Digits of the largest integer. States of random generators have 128 bits."""
_DIGITS = bytes.maketrans(b"123456789E", b"000000000e")
_NUMBERS_TO_CHECK = (b"0" * (_LONGEST_NUMBER + 1), b"e000", b"e+000")
"""Long integers and large exponents, after `_DIGITS`: twenty times as fast as a regular expression."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_REASONS = {
    errno.ELOOP: "it is a link",
    errno.ENOTDIR: "a directory on its path is a link or a file",
    errno.ENXIO: "it is not a regular file",
}


def open_file(path: Path, run: Path | None = None, most: float = LARGEST) -> BufferedReader:
    """Open a regular file of at most `most` bytes for reading.

    run: the directory below which no link is followed; default: the one that holds the file. Raises `FileNotFoundError` if
    there is no file, and `InputError` for links, anything but a regular file, and files that are too large.
    """
    root, descriptors = run or path.parent, list[int]()
    try:
        descriptors.append(os.open(root, _FOLDER))
        *folders, name = path.relative_to(root).parts
        if ".." in folders:
            raise ValueError("its path leads out of the run")
        for folder in folders:
            descriptors.append(os.open(folder, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptors[-1]))
        file = open(os.open(name, _FILE, dir_fd=descriptors[-1]), "rb")  # noqa: SIM115
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        code = error.errno if isinstance(error, OSError) else None
        raise _unreadable(path, _REASONS.get(code or 0, getattr(error, "strerror", None) or str(error))) from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode) or status.st_size > most:
        file.close()
        raise _unreadable(path, "it is not a regular file" if status.st_size <= most else _too_large(most))
    return file


def is_file(path: Path) -> bool:
    """Whether `path` is a regular file and not a link."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def read_bytes(path: Path, most: int = _LARGEST_DOCUMENT, run: Path | None = None) -> bytes:
    """The content of a file of at most `most` bytes. InputError as for `open_file`, and for a missing file."""
    try:
        with open_file(path, run, most) as file:
            content = file.read(most + 1)
    except FileNotFoundError:
        raise InputError(f"{path} is missing; restore the file") from None
    except OSError as error:
        raise _unreadable(path, error.strerror) from error
    if len(content) > most:
        raise _unreadable(path, _too_large(most))
    return content


def read_text(path: Path, most: int = _LARGEST_DOCUMENT, run: Path | None = None) -> str:
    """The content of a UTF-8 file; errors as for `read_bytes`."""
    try:
        return read_bytes(path, most, run).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} cannot be read: byte {error.start} is not UTF-8 text; restore the file") from None


def read_json(path: Path, most: int = _LARGEST_DOCUMENT, run: Path | None = None) -> dict[str, Any]:
    """The JSON object in a file; errors as for `read_bytes`."""
    content = read_bytes(path, most, run)
    try:
        values = parse_json(content)
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
    except ValueError as error:
        raise InputError(f"{path} cannot be read: {error}; restore the file") from None
    return values


def parse_json(content: bytes, finite: bool = False) -> Any:
    """The value of a JSON text. ValueError if it is malformed, nested too deeply, or has an integer of more than 40 digits.

    finite: also refuse numbers that are not finite.
    """
    shape = content.translate(_DIGITS)
    strict: dict[str, Any] = {"parse_int": _integer} if any(part in shape for part in _NUMBERS_TO_CHECK) else {}
    if finite:
        strict |= {"parse_constant": _float} | ({"parse_float": _float} if strict else {})
    try:
        return json.loads(content, **strict)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def complete_lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The lines of a log without an incomplete last one. InputError for a line that is too long, or if reading fails."""
    number = 0
    try:
        while (raw := file.readline(LONGEST_LINE)).endswith(b"\n"):
            number += 1
            yield raw
    except OSError as error:
        raise _unreadable(path, error.strerror) from error
    if len(raw) >= LONGEST_LINE:
        raise InputError(
            f"{path}, line {number + 1} is longer than {LONGEST_LINE >> 20} MiB; delete that line and retry"
        )


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > _LONGEST_NUMBER:
        raise ValueError(f"it has a number of {len(digits)} digits")
    return int(digits)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it has the number {text[:40]}, which is not finite")
    return value


def _too_large(most: float) -> str:
    return f"it is larger than {int(most) >> 20} MiB"


def _unreadable(path: Path, reason: str | None) -> InputError:
    return InputError(f"{path} cannot be read: {reason}; restore the file")
