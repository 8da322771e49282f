"""The entries of a journal: every change of notes with what was there before, kept in memory or in the vault's folder.

A folder of notes may come from anybody, and its journal with it. So a line counts only where it is one that this file
may have written: anything else makes the whole journal damaged, and a damaged journal is moved aside, not used.


The journal of a vault: operations carried out and taken back, and what changed since a mark."""

import difflib
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol

from posttrain_memory.vault.limits import VaultError, shown
from posttrain_memory.vault.storage import RESERVED, DiskStorage, Storage, is_note

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


_UNDO = "undo "
"""Begins the name of an operation that takes others back; the number of the first of them follows."""


class Journal:
    """Writes down each operation before it is carried out, carries it out, and takes it back."""

    def __init__(self, storage: Storage, most: int) -> None:
        self._storage = storage
        self._log: MemoryLog | DiskLog = DiskLog(storage, most) if isinstance(storage, DiskStorage) else MemoryLog(most)
        if isinstance(self._log, DiskLog) and not storage.read_only:
            self._recover(self._log)
        entries = self._log.entries()
        self._next = entries[-1].number + 1 if entries else 1

    def commit(self, operation: str, changes: tuple[Change, ...]) -> None:
        """Carry out `changes`, all or none."""
        self._check_writable()
        entry = Entry(self._next, operation, changes, int(time.time()))
        self._log.append(entry)
        self._next += 1
        try:
            self._put(changes, lambda change: change.after)
        except BaseException:
            self._put(changes[::-1], lambda change: change.before)
            self._log.keep(len(self._log.entries()) - 1)
            raise

    def undo(self, first: int | None = None) -> list[Entry]:
        """Take back the operation number `first`, or else the last one, and all after it, all or none; newest first.

        VaultError where there are none, or where one of their notes was changed otherwise since.
        """
        self._check_writable()
        entries = self._log.entries()
        if not entries:
            raise VaultError("there is nothing to undo")
        first = entries[-1].number if first is None else first
        undone = [entry for entry in entries if entry.number >= first]
        if not undone or undone[0].number != first:
            raise VaultError("the journal has forgotten what is to be undone")
        now: dict[str, str | None] = {}
        then: dict[str, str | None] = {}
        for entry in reversed(undone):
            for change in entry.changes:
                if change.path not in now:
                    now[change.path] = then[change.path] = self._now(change.path)
                if then[change.path] != change.after:
                    raise VaultError(f"{shown(change.path)} was changed from outside since; nothing is undone")
                then[change.path] = change.before
        back = [Change(path, now[path], then[path]) for path in now if now[path] != then[path]]
        if back:
            # What comes into being stands last: where the system ignores case, two paths may be one file.
            self.commit(f"{_UNDO}{first}", tuple(sorted(back, key=lambda change: change.after is not None)))
        self._forget(first)
        return undone[::-1]

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

    @property
    def remark(self) -> str | None:
        """One sentence for the user where the journal was damaged and is not used; None otherwise."""
        return self._log.remark if isinstance(self._log, DiskLog) else None

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

    def _forget(self, first: int) -> None:
        """Drop the operation number `first` and all after it."""
        self._log.keep(sum(entry.number < first for entry in self._log.entries()))

    def _recover(self, log: DiskLog) -> None:
        """Finish what a crash cut off.

        An operation of which some notes are still as before is taken back whole. An undo that is complete has only to be
        forgotten, with what it undid.
        """
        entries = log.entries()
        if not entries:
            return
        changes = entries[-1].changes
        try:
            now = {change.path: self._now(change.path) for change in changes}
        except VaultError:
            return
        untouched = any(now[change.path] == change.before != change.after for change in changes)
        known = all(now[change.path] in (change.before, change.after) for change in changes)
        if known and not untouched:
            undone = [entry.number for entry in entries if entries[-1].operation == f"{_UNDO}{entry.number}"]
            if undone:
                self._forget(undone[0])
        if untouched and known:
            self._take_back(log, changes, now)

    def _take_back(self, log: DiskLog, changes: tuple[Change, ...], now: Mapping[str, str | None]) -> None:
        """Take back the last operation, of which not all was carried out; `now`: the notes as they are."""
        try:
            self._put(changes[::-1], lambda change: change.before)
        except VaultError:
            # No operation of ours leaves what cannot be taken back, unless the disk is full: nothing is lost then either.
            for change in changes:
                with suppress(VaultError):
                    self._put((change,), lambda change: now[change.path])
            log.set_aside()
            return
        log.keep(len(log.entries()) - 1)


def _diff(change: Change) -> str:
    before, after = ((text or "").splitlines() for text in (change.before, change.after))
    old = change.path if change.before is not None else "(no note)"
    new = change.path if change.after is not None else "(no note)"
    return "".join(f"{line}\n" for line in difflib.unified_diff(list(before), list(after), old, new, lineterm=""))
