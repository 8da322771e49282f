"""The journal of a vault: every change with what was there before, undo, and what changed since a mark."""

import difflib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from posttrain.environments.memory.limits import VaultError, shown
from posttrain.environments.memory.storage import DiskStorage, Storage

_FILE = "journal.jsonl"
_BYTES = 8 * 1024 * 1024
"""What a journal on disk is shortened to once it is twice as long."""


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


class Log(Protocol):
    """Where entries are kept, oldest first."""

    def entries(self) -> list[Entry]: ...
    def append(self, entry: Entry) -> None: ...
    def drop_last(self) -> None: ...


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

    def drop_last(self) -> None:
        self._entries.pop()


class DiskLog:
    """Entries in a file of the vault's reserved folder, one JSON line each, kept from process to process."""

    def __init__(self, storage: DiskStorage, most: int) -> None:
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
        self._load()
        if not storage.read_only:
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

    def drop_last(self) -> None:
        self._entries.pop()
        self._ends.pop()
        os.ftruncate(self._file, self._end())
        self._reach_disk()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _reach_disk(self) -> None:
        if self._storage.sync:
            os.fsync(self._file)

    def _end(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _load(self) -> None:
        with open(os.dup(self._file), "rb") as stream:
            stream.seek(0)
            end = 0
            for line in stream:
                entry = _entry(line)
                if entry is None:
                    break
                end += len(line)
                self._entries.append(entry)
                self._ends.append(end)

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


class Journal:
    """Writes down each operation before it is carried out, carries it out, and takes it back."""

    def __init__(self, storage: Storage, most: int) -> None:
        self._storage = storage
        self._log: MemoryLog | DiskLog = DiskLog(storage, most) if isinstance(storage, DiskStorage) else MemoryLog(most)
        if isinstance(storage, DiskStorage) and not storage.read_only:
            self._recover()
        entries = self._log.entries()
        self._next = entries[-1].number + 1 if entries else 1

    def commit(self, operation: str, changes: tuple[Change, ...]) -> None:
        """Carry out `changes`, all or none."""
        self._check_writable()
        entry = Entry(self._next, operation, changes)
        self._log.append(entry)
        self._next += 1
        try:
            self._put(changes, lambda change: change.after)
        except BaseException:
            self._put(changes[::-1], lambda change: change.before)
            self._log.drop_last()
            raise

    def undo(self) -> Entry:
        """Take back the last operation; VaultError where there is none, or where its notes changed otherwise."""
        self._check_writable()
        entries = self._log.entries()
        if not entries:
            raise VaultError("there is nothing to undo")
        entry = entries[-1]
        for change in entry.changes:
            if self._now(change.path) != change.after:
                raise VaultError(f"{shown(change.path)} was changed from outside since; nothing is undone")
        self._put(entry.changes[::-1], lambda change: change.before)
        self._log.drop_last()
        return entry

    def entries(self) -> list[Entry]:
        """The operations that can be undone, oldest first."""
        return list(self._log.entries())

    def mark(self) -> int:
        """This moment, for `changes` and `diff`."""
        entries = self._log.entries()
        return entries[-1].number if entries else 0

    def changes(self, since: int = 0) -> list[Change]:
        """What became of each note since a mark, by path; notes that are as they were then are left out."""
        first: dict[str, str | None] = {}
        last: dict[str, str | None] = {}
        for entry in self._log.entries():
            if entry.number > since:
                for change in entry.changes:
                    first.setdefault(change.path, change.before)
                    last[change.path] = change.after
        return [Change(path, first[path], last[path]) for path in sorted(first) if first[path] != last[path]]

    def diff(self, since: int = 0) -> str:
        """The changes since a mark as a unified diff; "" where there are none."""
        return "".join(_diff(change) for change in self.changes(since))

    def close(self) -> None:
        """Give back the file, where there is one."""
        if isinstance(self._log, DiskLog):
            self._log.close()

    def _check_writable(self) -> None:
        if self._storage.read_only:
            raise VaultError("the memory is read-only", "PermissionError")

    def _now(self, path: str) -> str | None:
        return self._storage.read(path, 1 << 30)

    def _put(self, changes: tuple[Change, ...], wanted: Callable[[Change], str | None]) -> None:
        for change in changes:
            text = wanted(change)
            if self._now(change.path) == text:
                continue
            if text is None:
                self._storage.remove(change.path)
            else:
                self._storage.write(change.path, text)

    def _recover(self) -> None:
        """Finish what a crash cut off: an operation of which some notes are still as before is taken back whole."""
        entries = self._log.entries()
        if not entries:
            return
        changes = entries[-1].changes
        try:
            now = {change.path: self._now(change.path) for change in changes}
        except VaultError:
            return
        untouched = any(now[change.path] == change.before != change.after for change in changes)
        known = all(now[change.path] in (change.before, change.after) for change in changes)
        if untouched and known:
            self._put(changes[::-1], lambda change: change.before)
            self._log.drop_last()


def _line(entry: Entry) -> bytes:
    changes = [[change.path, change.before, change.after] for change in entry.changes]
    return json.dumps([entry.number, entry.operation, changes], ensure_ascii=False).encode() + b"\n"


def _entry(line: bytes) -> Entry | None:
    """The entry of a line; None where the line is not whole."""
    try:
        number, operation, changes = json.loads(line)
        return Entry(number, operation, tuple(Change(*change) for change in changes)) if line.endswith(b"\n") else None
    except (ValueError, TypeError):
        return None


def _diff(change: Change) -> str:
    before, after = ((text or "").splitlines() for text in (change.before, change.after))
    old = change.path if change.before is not None else "(no note)"
    new = change.path if change.after is not None else "(no note)"
    return "".join(f"{line}\n" for line in difflib.unified_diff(list(before), list(after), old, new, lineterm=""))
