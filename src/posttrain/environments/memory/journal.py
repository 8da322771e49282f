"""The journal of a vault: operations carried out and taken back, and what changed since a mark."""

import difflib
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from posttrain.environments.memory.limits import VaultError, shown
from posttrain.environments.memory.log import Change, DiskLog, Entry, MemoryLog
from posttrain.environments.memory.storage import DiskStorage, Storage

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
