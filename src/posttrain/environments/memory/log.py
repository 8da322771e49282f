"""The entries of a journal: every change of notes with what was there before, kept in memory or in the vault's folder.

A folder of notes may come from anybody, and its journal with it. So a line counts only where it is one that this file
may have written: anything else makes the whole journal damaged, and a damaged journal is moved aside, not used.
"""

import json
import os
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol

from posttrain.environments.memory.storage import RESERVED, DiskStorage, is_note

_FILE = "journal.jsonl"
_BYTES = 8 * 1024 * 1024
"""What a journal on disk is shortened to once it is twice as long."""
_END_OF_TIME = 253_370_764_800
"""The year 9999, in seconds since 1970; no calendar here goes on from there."""


@dataclass(frozen=True)
class Change:
    """What became of one note. None: the note did not exist."""

    path: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Entry:
    """One operation, with all that it changed; `number` counts from 1 and is never used twice in a journal."""

    number: int
    operation: str
    changes: tuple[Change, ...]
    time: int | None = field(default=None, compare=False)
    """When it was carried out, in seconds since 1970; None in journals that did not keep it."""


class Log(Protocol):
    """Where entries are kept, oldest first."""

    def entries(self) -> list[Entry]: ...
    def append(self, entry: Entry) -> None: ...
    def keep(self, count: int) -> None:
        """Drop all entries but the first `count`."""


class MemoryLog:
    """Entries that go with the process."""

    def __init__(self, most: int) -> None:
        self._entries: list[Entry] = []
        self._most = most

    def entries(self) -> list[Entry]:
        return self._entries

    def append(self, entry: Entry) -> None:
        self._entries.append(entry)
        del self._entries[: -self._most]

    def keep(self, count: int) -> None:
        del self._entries[count:]


class DiskLog:
    """Entries in a file of the vault's reserved folder, one JSON line each, kept from process to process."""

    def __init__(self, storage: DiskStorage, most: int) -> None:
        self.remark: str | None = None
        """One sentence for the user where the journal was damaged; None otherwise."""
        self._most = most
        self._storage = storage
        self._entries: list[Entry] = []
        self._ends: list[int] = []
        """Where the line of each entry ends, in bytes."""
        try:
            self._file = storage.reserved(_FILE)
        except FileNotFoundError:
            self._file = -1
            return
        if not self._load():
            self.set_aside()
        elif not storage.read_only:
            # A line that was cut off by a crash was never followed by its change.
            os.ftruncate(self._file, self._end())

    def entries(self) -> list[Entry]:
        return self._entries

    def append(self, entry: Entry) -> None:
        line = _line(entry)
        os.pwrite(self._file, line, self._end())
        self._reach_disk()
        self._ends.append(self._end() + len(line))
        self._entries.append(entry)
        # Rewriting the file for every forgotten entry would cost as much as the journal is long.
        if len(self._entries) > 2 * self._most or self._end() > 2 * _BYTES:
            self._shorten()

    def keep(self, count: int) -> None:
        del self._entries[count:], self._ends[count:]
        os.ftruncate(self._file, self._end())
        self._reach_disk()

    def set_aside(self) -> None:
        """Begin anew: the file is kept under another name, or where nothing may be written, not looked at."""
        self._entries, self._ends = [], []
        if self._storage.read_only:
            self.remark = f"{RESERVED}/{_FILE} is damaged and was not read; the notes are as they were"
            return
        os.close(self._file)
        kept = self._storage.set_aside(_FILE)
        self._file = self._storage.reserved(_FILE)
        self.remark = (
            f"{RESERVED}/{_FILE} was damaged: it is kept as {RESERVED}/{kept}, the notes are as they were, and what was "
            "changed before now cannot be undone"
        )

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _reach_disk(self) -> None:
        if self._storage.sync:
            os.fsync(self._file)

    def _end(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _load(self) -> bool:
        """Read the file; False where it is damaged. Its last line may be cut off, as by a crash, and does not count."""
        # No journal of ours grows so long, escaped characters and one last long operation included.
        if os.fstat(self._file).st_size > 16 * _BYTES:
            return False
        with open(os.dup(self._file), "rb") as stream:
            stream.seek(0)
            end = 0
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                entry = _entry(line)
                if entry is None:
                    return False
                end += len(line)
                self._entries.append(entry)
                self._ends.append(end)
        return all(one.number < next_.number for one, next_ in pairwise(self._entries))

    def _shorten(self) -> None:
        kept: list[tuple[Entry, bytes]] = []
        size = 0
        for entry in reversed(self._entries[-self._most :]):
            line = _line(entry)
            size += len(line)
            # The last operation can always be undone, however long it is.
            if kept and size > _BYTES:
                break
            kept.append((entry, line))
        kept.reverse()
        self._storage.replace_reserved(_FILE, b"".join(line for _, line in kept))
        os.close(self._file)
        self._file = self._storage.reserved(_FILE)
        self._entries = [entry for entry, _ in kept]
        self._ends = list(accumulate(len(line) for _, line in kept))


def _line(entry: Entry) -> bytes:
    changes = [[change.path, change.before, change.after] for change in entry.changes]
    return json.dumps([entry.number, entry.operation, changes, entry.time], ensure_ascii=False).encode() + b"\n"


def _entry(line: bytes) -> Entry | None:
    """The entry of a line; None where it is none that `_line` makes, or made before it kept the time."""
    try:
        match json.loads(line):
            case [int(number), str(operation), [_, *_] as changes, *rest] if len(rest) < 2:
                time = rest[0] if rest else None
                read = tuple(_change(change) for change in changes)
                sound = type(number) is int and number > 0 and operation.isprintable()
                timed = time is None or (type(time) is int and 0 <= time < _END_OF_TIME)
                once = len({change.path for change in read}) == len(read)
                return Entry(number, operation, read, time) if sound and timed and once else None
    except (ValueError, RecursionError):
        pass
    return None


def _change(change: object) -> Change:
    """A change as it is written in a line; ValueError where its path is none of a note or a text is none."""
    match change:
        case [str(path), str() | None as before, str() | None as after] if is_note(path):
            # Half a character of two, which JSON can spell, could not be written into a note.
            (before or "").encode()
            (after or "").encode()
            return Change(path, before, after)
    raise ValueError("no change")
