"""The log of generated completions: JSON lines, appended in order of completion and sorted when published."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from posttrain.errors import InputError, RunError
from posttrain.locks import lock
from posttrain.runs.directory import LineLog, remove_partials, storage_errors, write_atomically

Key = tuple[int | str, int]
"""(id of the row, sample number)."""
_FORMAT = "posttrain_completions"


class CompletionLog(AbstractContextManager["CompletionLog"]):
    """An append-only file of JSON lines. The first line describes the run that the others belong to.

    Leaving the context manager syncs the file to disk, or deletes it if it has no answers.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], replaces: Path | None = None) -> None:
        """Open or create the log at `path`; `about` (JSON values) is its first line.

        `replaces`: an existing file that `publish` may overwrite as long as its content does not change, even after a
        resumption. Raises `InputError` with the differing keys if `about` differs from that of the log at `path`, and
        `RunError` for a damaged line.
        """
        self.path = path
        self._about = json.loads(json.dumps(about))
        self._replaces = None if replaces is None else _digest(replaces)
        self._spans: dict[Key, tuple[int, int]] = {}
        """Key -> offsets in bytes of the line and its end."""
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._log = LineLog(path)
        try:
            self._read()
        except BaseException:
            self._log.close()
            raise

    def __exit__(self, *error: object) -> None:
        self._log.close()
        if not self._spans:
            with storage_errors(self.path):
                self.path.unlink(missing_ok=True)

    def __contains__(self, key: Key) -> bool:
        return key in self._spans

    def __len__(self) -> int:
        return len(self._spans)

    def append(self, key: Key, answer: Mapping[str, Any]) -> None:
        """Append an answer (JSON values, with `id` and `sample` as in `key`); raises `ValueError` if `key` exists."""
        if key in self._spans:
            raise ValueError(f"duplicate answer {key}")
        if self._log.size == 0:
            replaces = {} if self._replaces is None else {"replaces": self._replaces}
            self._log.append(line_of({_FORMAT: 1, **self._about, **replaces}))
        self._spans[key] = self._log.size, self._log.append(line_of(answer))

    def __getitem__(self, key: Key) -> dict[str, Any]:
        """The answer with this key."""
        return json.loads(self._line(key))

    def answers(self) -> Iterator[dict[str, Any]]:
        """All answers in the order of arrival."""
        return (self[key] for key in self._spans)

    def publish(self, path: Path, keys: Iterable[Key], overwrite: bool = False) -> int:
        """Atomically write the answers of `keys`, in that order, to `path`, skipping missing ones; returns their number.

        Raises `RunError` if writing fails and, without `overwrite`, in the cases of `check_overwritable`. Processes
        that publish to the same directory take turns.
        """
        available = [key for key in keys if key in self._spans]
        folder = path.parent
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY)
        try:
            # Some file systems cannot lock directories. In this case, the check just before writing must suffice.
            with suppress(OSError):
                lock(descriptor, wait=True)
            if not overwrite:
                self.check_overwritable(path)
            write_lines(path, (self._line(key) for key in available))
        finally:
            os.close(descriptor)
        return len(available)

    def check_overwritable(self, path: Path) -> None:
        """Raise `RunError` if `path` contains a line that is not in this log, unless `path` is the file to replace."""
        with storage_errors(path):
            if self._contains_all(path) or (self._replaces is not None and self._replaces == _digest(path)):
                return
        raise RunError(
            f"{path} has lines that this run did not write, so it is not overwritten; the answers are in {self.path}. "
            "Move that file away, then continue with `--resume`"
        )

    def _contains_all(self, path: Path) -> bool:
        """Whether every line of `path` is in this log, so that overwriting loses nothing; True for a missing file."""
        try:
            with open(path, "rb") as lines:
                for line in lines:
                    answer = json.loads(line)
                    if self._line((answer["id"], answer["sample"])) != line:
                        return False
        except FileNotFoundError:
            return True
        except (ValueError, KeyError, TypeError, RecursionError):
            return False
        return True

    def _line(self, key: Key) -> bytes:
        return self._log.read(*self._spans[key])

    def _read(self) -> None:
        self._log.cut()
        for number, (end, line) in enumerate(self._log.lines(), 1):
            try:
                value = dict(json.loads(line))
                if number > 1 and not (isinstance(value["id"], int | str) and isinstance(value["sample"], int)):
                    raise TypeError("no id and sample")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise RunError(
                    f"{self.path}, line {number} is damaged; delete that line and continue with `--resume`"
                ) from error
            if number > 1:
                self._spans[value["id"], value["sample"]] = (end - len(line), end)
                continue
            differs = [name for name, known in self._about.items() if value.get(name) != known]
            if differs:
                raise InputError(
                    f"{self.path} holds answers with another {' and another '.join(differs)}, so it cannot be continued; "
                    "undo the change, or generate under another `name`"
                )
            self._replaces = value.get("replaces")


def line_of(value: Mapping[str, Any]) -> bytes:
    """`value` as one line of JSON."""
    return (json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Atomically write `lines` to `path` as a stream, and remove partial files of killed processes.

    Raises `RunError` if writing fails.
    """
    with storage_errors(path):
        remove_partials(path)
    write_atomically(path, lines)


def _digest(path: Path) -> str | None:
    """SHA-256 of the file at `path` as hex digits; None if there is no file."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None
