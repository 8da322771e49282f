"""The answers of a generation: whole lines, appended as they come, and put in order at the end."""

import fcntl
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from posttrain.errors import InputError, RunError
from posttrain.runs.files import PARTIAL, process_runs, storage_errors, write_atomically

Key = tuple[int | str, int]
"""Id of a row, and which sample it is."""
_FORMAT = "posttrain_answers"


class AnswerLog:
    """An append-only file of JSON lines, the first of which says what the answers are of.

    Each line reaches the operating system before `append` returns, so a killed process loses none; a last line that
    a kill tore is cut off when the file is opened. A context manager; leaving it syncs the file to disk, or deletes
    it where no answer came.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], replaces: Path | None = None) -> None:
        """Open the log at `path`, or begin it; `about` (JSON values) is its first line.

        `replaces`: a file that a new log may `publish` over as it now is, also after a kill. InputError where the log
        there is about something else, naming what differs; RunError for a damaged line.
        """
        self.path = path
        self._about = json.loads(json.dumps(about))
        self._replaces = None if replaces is None else _digest(replaces)
        self._places: dict[Key, tuple[int, int]] = {}
        """Where the line of an answer begins, and its bytes."""
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = io.FileIO(path, "a+")
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "AnswerLog":
        return self

    def __exit__(self, *error: object) -> None:
        with storage_errors(self.path):
            os.fsync(self._file.fileno())
            self._file.close()
            if not self._places:
                self.path.unlink(missing_ok=True)

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def append(self, key: Key, answer: Mapping[str, Any]) -> None:
        """Keep an answer (JSON values with `id` and `sample` as in `key`) that is not there yet."""
        if key in self._places:
            raise ValueError(f"the answer {key} is there already")
        if os.fstat(self._file.fileno()).st_size == 0:
            replaces = {} if self._replaces is None else {"replaces": self._replaces}
            self._append({_FORMAT: 1, **self._about, **replaces})
        self._places[key] = self._append(answer)

    def __getitem__(self, key: Key) -> dict[str, Any]:
        """The answer as it was kept."""
        return json.loads(self._line(key))

    def answers(self) -> Iterator[dict[str, Any]]:
        """All answers in the order in which they came, one at a time."""
        return (self[key] for key in self._places)

    def publish(self, path: Path, keys: Iterable[Key], overwrite: bool = False) -> int:
        """Write the lines of those `keys` that are there to `path`, in that order, whole or not at all; how many.

        Raises RunError where the disk refuses, and without `overwrite` where `refuse_foreign` does. Of several
        processes that publish to `path`, one at a time looks and writes.
        """
        found = [key for key in keys if key in self._places]
        with _one_at_a_time(path.parent):
            if not overwrite:
                self.refuse_foreign(path)
            write_lines(path, (self._line(key) for key in found))
        return len(found)

    def refuse_foreign(self, path: Path) -> None:
        """RunError where the file at `path` holds a line that is not in this log, unless it is the one to replace."""
        with storage_errors(path):
            if self._holds(path) or (self._replaces is not None and self._replaces == _digest(path)):
                return
        raise RunError(
            f"{path} holds what this run did not write, so it is left as it is and the answers stay in {self.path}; move "
            "that file away, then go on with `--resume`"
        )

    def _holds(self, path: Path) -> bool:
        """Whether every line of `path` is one of this log, so that nothing is lost with it. So is what is not there."""
        try:
            with open(path, "rb") as lines:
                for line in lines:
                    answer = json.loads(line)
                    if self._line((answer["id"], answer["sample"])) != line:
                        return False
        except FileNotFoundError:
            return True
        except (ValueError, KeyError, TypeError):
            return False
        return True

    def _line(self, key: Key) -> bytes:
        start, size = self._places[key]
        return os.pread(self._file.fileno(), size, start)

    def _append(self, value: Mapping[str, Any]) -> tuple[int, int]:
        line = line_of(value)
        end = os.fstat(self._file.fileno()).st_size
        with storage_errors(self.path):
            try:
                view = memoryview(line)
                while view:
                    view = view[self._file.write(view) :]
            except OSError:
                self._file.truncate(end)
                raise
        return end, len(line)

    def _read(self) -> None:
        end = 0
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                if number == 1:
                    self._check(_object(line, self.path, number))
                else:
                    answer = _object(line, self.path, number)
                    self._places[answer["id"], answer["sample"]] = (end, len(line))
                end += len(line)
        with storage_errors(self.path):
            self._file.truncate(end)

    def _check(self, found: dict[str, Any]) -> None:
        differs = [name for name, value in self._about.items() if found.get(name) != value]
        if differs:
            raise InputError(
                f"{self.path} holds answers to another {' and another '.join(differs)}, so it is not gone on with; restore "
                "what has changed, or generate under another `name`"
            )
        self._replaces = found.get("replaces")


def line_of(value: Mapping[str, Any]) -> bytes:
    """`value` as a line of JSON."""
    return (json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Write `lines` to `path`, whole or not at all, one at a time; removes what killed processes left half-written.

    Raises RunError where the disk refuses.
    """
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for other in path.parent.glob(f".{path.name}.*.partial"):
            writer = PARTIAL.match(other.name)
            if writer and not process_runs(int(writer[1])):
                other.unlink(missing_ok=True)
    write_atomically(path, lines)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold `folder`, made where it is not there, against the other processes that come here; they wait."""
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Some file systems lock no directories; there looking just before writing has to do.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str | None:
    """SHA-256 of the file at `path` in hex digits; None where there is none."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def _object(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
        if number > 1 and not (isinstance(found["id"], int | str) and isinstance(found["sample"], int)):
            raise TypeError("no id and sample")
        return dict(found)
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}, line {number} is damaged; delete that line and go on with `--resume`") from error
