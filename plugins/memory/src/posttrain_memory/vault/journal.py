"""The journal of a vault: each operation is recorded before it is applied, so it can be undone and survives a crash.

On disk the journal is untrusted input, because a folder of notes may come from an untrusted source. A line counts only
if this module could have written it. Anything else makes the whole journal damaged; a damaged journal is renamed and
not used.
"""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

from posttrain.runs.directory import LineLog
from posttrain_memory.vault.limits import VaultError, quoted
from posttrain_memory.vault.storage import RESERVED, DiskStorage, Storage, is_note
from posttrain_memory.vault.text import diff

_FILE = "journal.jsonl"
_BYTES = 8 * 1024 * 1024
"""A journal file of twice this size, in bytes, is shortened to it."""
_END_OF_TIME = 253_370_764_800
"""The year 9999, in seconds since 1970. Later times cannot be formatted."""


@dataclass(frozen=True)
class Change:
    """The change of one note. `before` or `after` is None if the note did not exist."""

    path: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Entry:
    """One operation with all its changes. `number` counts from 1 and is never reused within a journal."""

    number: int
    operation: str
    changes: tuple[Change, ...]
    time: int | None = field(default=None, compare=False)
    """When the operation was applied, in seconds since 1970. None in journals that did not record it."""


class MemoryLog:
    """At most `most` entries in memory, oldest first; lost when the process ends."""

    def __init__(self, most: int) -> None:
        self.warning: str | None = None
        """A warning for the user if the journal was damaged; otherwise None."""
        self._entries: list[Entry] = []
        self._most = most

    def entries(self) -> list[Entry]:
        return self._entries

    def append(self, entry: Entry) -> None:
        self._entries.append(entry)
        del self._entries[: -self._most]

    def truncate(self, count: int) -> None:
        """Drop all entries except the first `count`."""
        del self._entries[count:]

    def close(self) -> None:
        """Close the file, if there is one."""


class DiskLog(MemoryLog):
    """Entries in a file of the vault's reserved folder, one JSON line each."""

    def __init__(self, storage: DiskStorage, most: int) -> None:
        super().__init__(most)
        self._storage = storage
        self._ends: list[int] = []
        """End of each entry's line, as a byte offset."""
        self._log: LineLog | None = None
        try:
            self._log = self._open()
        except FileNotFoundError:
            return
        if not self._load(self._log):
            self.move_aside()
        elif not storage.read_only:
            # A line truncated by a crash was never followed by its change.
            self._log.truncate(self._end())

    def _open(self) -> LineLog:
        return LineLog(Path(RESERVED, _FILE), self._storage.reserved(_FILE), 0 if self._storage.sync else None)

    def append(self, entry: Entry) -> None:
        assert self._log is not None
        self._ends.append(self._log.append(_line(entry)))
        self._entries.append(entry)
        # Rewriting the file for every dropped entry would cost time proportional to the whole journal.
        if len(self._entries) > 2 * self._most or self._end() > 2 * _BYTES:
            self._shorten()

    def truncate(self, count: int) -> None:
        assert self._log is not None
        del self._entries[count:], self._ends[count:]
        self._log.truncate(self._end())
        if self._storage.sync:
            self._log.sync()

    def move_aside(self) -> None:
        """Start an empty journal. The old file is renamed, or ignored if the vault is read-only."""
        self._entries, self._ends = [], []
        if self._storage.read_only:
            self.warning = f"{RESERVED}/{_FILE} is damaged and was not used; the notes are unchanged"
            return
        self.close()
        kept = self._storage.move_aside(_FILE)
        self._log = self._open()
        self.warning = (
            f"{RESERVED}/{_FILE} was damaged and renamed to {RESERVED}/{kept}; the notes are unchanged, and earlier "
            "changes cannot be undone"
        )

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        self._log = None

    def _end(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _load(self, log: LineLog) -> bool:
        """Read the file. Returns False if it is damaged. A truncated last line, as a crash leaves it, is ignored."""
        # A valid journal stays below this size, including escaped characters and one long last operation.
        if log.size > 16 * _BYTES:
            return False
        for end, line in log.lines():
            entry = _entry(line)
            if entry is None:
                return False
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
        self.close()
        self._log = self._open()
        self._entries = [entry for entry, _ in kept]
        self._ends = list(accumulate(len(line) for _, line in kept))


def _line(entry: Entry) -> bytes:
    changes = [[change.path, change.before, change.after] for change in entry.changes]
    return json.dumps([entry.number, entry.operation, changes, entry.time], ensure_ascii=False).encode() + b"\n"


def _entry(line: bytes) -> Entry | None:
    """Parse a line. None unless `_line` could have written it; older versions wrote no time."""
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
    """Parse the change of one note. Raises ValueError for an invalid path or text."""
    match change:
        case [str(path), str() | None as before, str() | None as after] if is_note(path):
            # JSON can encode a lone surrogate, which cannot be written to a note.
            (before or "").encode()
            (after or "").encode()
            return Change(path, before, after)
    raise ValueError("no change")


_UNDO = "undo "
"""Prefix of the operation name of an undo, followed by the number of the first operation it reverts."""


class Journal:
    """Records each operation before applying it, and reverts operations."""

    def __init__(self, storage: Storage, most: int) -> None:
        self._storage = storage
        self._log = DiskLog(storage, most) if isinstance(storage, DiskStorage) else MemoryLog(most)
        if isinstance(self._log, DiskLog) and not storage.read_only:
            self._recover(self._log)
        entries = self._log.entries()
        self._next = entries[-1].number + 1 if entries else 1

    def commit(self, operation: str, changes: tuple[Change, ...]) -> None:
        """Apply `changes`, all or none."""
        self._check_writable()
        entry = Entry(self._next, operation, changes, int(time.time()))
        self._log.append(entry)
        self._next += 1
        try:
            self._write_note(changes, lambda change: change.after)
        except BaseException:
            self._write_note(changes[::-1], lambda change: change.before)
            self._log.truncate(len(self._log.entries()) - 1)
            raise

    def undo(self, first: int | None = None) -> list[Entry]:
        """Revert operation number `first` and all later ones, all or none; by default only the last one.

        Returns the reverted operations, newest first. Raises VaultError if there are none, or if one of their notes
        has been changed by something else since.
        """
        self._check_writable()
        entries = self._log.entries()
        if not entries:
            raise VaultError("there is nothing to undo")
        first = entries[-1].number if first is None else first
        undone = [entry for entry in entries if entry.number >= first]
        if not undone or undone[0].number != first:
            raise VaultError("the journal no longer has the operations to undo")
        now: dict[str, str | None] = {}
        then: dict[str, str | None] = {}
        for entry in reversed(undone):
            for change in entry.changes:
                if change.path not in now:
                    now[change.path] = then[change.path] = self._current(change.path)
                if then[change.path] != change.after:
                    raise VaultError(f"{quoted(change.path)} was changed outside of the journal; nothing is undone")
                then[change.path] = change.before
        back = [Change(path, now[path], then[path]) for path in now if now[path] != then[path]]
        if back:
            # Created notes come last: on a case-insensitive file system two paths may be one file.
            self.commit(f"{_UNDO}{first}", tuple(sorted(back, key=lambda change: change.after is not None)))
        self._drop_from(first)
        return undone[::-1]

    def entries(self) -> list[Entry]:
        """The operations that can be undone, oldest first."""
        return list(self._log.entries())

    def mark(self) -> int:
        """A mark for the current state, to pass to `changes` and `diff`."""
        entries = self._log.entries()
        return entries[-1].number if entries else 0

    def changes(self, since: int = 0) -> list[Change]:
        """The net change of each note since a mark, sorted by path. Notes with no net change are omitted."""
        first: dict[str, str | None] = {}
        last: dict[str, str | None] = {}
        for entry in self._log.entries():
            if entry.number > since:
                for change in entry.changes:
                    first.setdefault(change.path, change.before)
                    last[change.path] = change.after
        return [Change(path, first[path], last[path]) for path in sorted(first) if first[path] != last[path]]

    def diff(self, since: int = 0) -> str:
        """The changes since a mark as a unified diff; "" if there are none."""
        changes = self.changes(since)
        before = {change.path: change.before for change in changes if change.before is not None}
        after = {change.path: change.after for change in changes if change.after is not None}
        return f"{diff(before, after)}\n" if changes else ""

    @property
    def warning(self) -> str | None:
        """A warning for the user if the journal was damaged and is not used; otherwise None."""
        return self._log.warning

    def close(self) -> None:
        """Close the journal file, if any."""
        self._log.close()

    def _check_writable(self) -> None:
        if self._storage.read_only:
            raise VaultError("the memory is read-only", "PermissionError")

    def _current(self, path: str) -> str | None:
        return self._storage.read(path, 1 << 30)

    def _write_note(self, changes: tuple[Change, ...], wanted: Callable[[Change], str | None]) -> None:
        for change in changes:
            text = wanted(change)
            if self._current(change.path) == text:
                continue
            if text is None:
                self._storage.remove(change.path)
            else:
                self._storage.write(change.path, text)

    def _drop_from(self, first: int) -> None:
        """Drop operation number `first` and all later ones."""
        self._log.truncate(sum(entry.number < first for entry in self._log.entries()))

    def _recover(self, log: DiskLog) -> None:
        """Complete what a crash interrupted.

        An operation that was applied only in part is reverted. A completed undo still has to be removed from the
        journal, together with the operations it reverted.
        """
        entries = log.entries()
        if not entries:
            return
        changes = entries[-1].changes
        try:
            now = {change.path: self._current(change.path) for change in changes}
        except VaultError:
            return
        untouched = any(now[change.path] == change.before != change.after for change in changes)
        known = all(now[change.path] in (change.before, change.after) for change in changes)
        if known and not untouched:
            undone = [entry.number for entry in entries if entries[-1].operation == f"{_UNDO}{entry.number}"]
            if undone:
                self._drop_from(undone[0])
        if untouched and known:
            self._revert(log, changes, now)

    def _revert(self, log: DiskLog, changes: tuple[Change, ...], now: Mapping[str, str | None]) -> None:
        """Revert the last operation, which was applied only in part. `now` holds the current notes."""
        try:
            self._write_note(changes[::-1], lambda change: change.before)
        except VaultError:
            # Operations of this class can always be reverted unless the disk is full. Nothing is lost in that case.
            for change in changes:
                with suppress(VaultError):
                    self._write_note((change,), lambda change: now[change.path])
            log.move_aside()
            return
        log.truncate(len(log.entries()) - 1)
