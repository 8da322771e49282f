"""The journal of a vault: operations carried out and taken back, and what changed since a mark."""

import difflib
from collections.abc import Callable
from contextlib import suppress

from posttrain.environments.memory.limits import VaultError, shown
from posttrain.environments.memory.log import Change, DiskLog, Entry, MemoryLog
from posttrain.environments.memory.storage import DiskStorage, Storage


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

    def _recover(self, log: DiskLog) -> None:
        """Finish what a crash cut off: an operation of which some notes are still as before is taken back whole."""
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
        if not (untouched and known):
            return
        try:
            self._put(changes[::-1], lambda change: change.before)
        except VaultError:
            # No operation of ours leaves what cannot be taken back, unless the disk is full: nothing is lost then either.
            for change in changes:
                with suppress(VaultError):
                    self._put((change,), lambda change: now[change.path])
            log.set_aside()
            return
        log.drop_last()


def _diff(change: Change) -> str:
    before, after = ((text or "").splitlines() for text in (change.before, change.after))
    old = change.path if change.before is not None else "(no note)"
    new = change.path if change.after is not None else "(no note)"
    return "".join(f"{line}\n" for line in difflib.unified_diff(list(before), list(after), old, new, lineterm=""))
