"""Listing and undoing the operations in a vault's journal; no model is needed."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path

from posttrain.errors import InputError, RunError
from posttrain.terminal import printable
from posttrain_memory.vault.journal import Entry
from posttrain_memory.vault.limits import VaultError
from posttrain_memory.vault.storage import RESERVED, DiskStorage
from posttrain_memory.vault.vault import Vault


def last_operations(folder: Path, count: int) -> list[str]:
    """The last `count` operations of a vault, newest first, one line each. Raises InputError if it is not a vault."""
    with _open_vault(folder, read_only=True) as vault:
        return [describe(entry) for entry in vault.journal.entries()[: -count - 1 : -1]]


def undo(folder: Path, count: int) -> list[str]:
    """Undo the last `count` operations of the vault in `folder`, all or none. Returns one line for each.

    Raises InputError if there are fewer operations, or if a note has been changed by something else since.
    """
    with _open_vault(folder, read_only=False) as vault:
        entries = vault.journal.entries()
        if len(entries) < count:
            raise InputError(f"the journal of {folder} has {len(entries)} operations; choose --count accordingly")
        try:
            return [describe(entry) for entry in vault.journal.undo(entries[-count].number)]
        except VaultError as error:
            raise InputError(f"the changes in {folder} cannot be undone: {error}") from None


def describe(entry: Entry) -> str:
    """An operation as one line: number, local time, name, and the change of each note."""
    when = "(time unknown)" if entry.time is None else f"{datetime.fromtimestamp(entry.time):%Y-%m-%d %H:%M:%S}"
    changes = []
    for change in entry.changes:
        before, after = (Counter((text or "").splitlines()) for text in (change.before, change.after))
        lines = f"+{(after - before).total()} -{(before - after).total()} lines"
        what = "made" if change.before is None else "removed" if change.after is None else lines
        changes.append(f"{change.path} ({what})")
    return printable(f"{entry.number:>4}  {when:<19}  {entry.operation:<7} {', '.join(changes)}")


@contextmanager
def _open_vault(folder: Path, read_only: bool) -> Iterator[Vault]:
    """The vault in `folder`. It may lack `user.md`, because undoing its removal is a use of undo."""
    if not (folder / RESERVED).is_dir():
        raise InputError(f"{folder} has no journal ({RESERVED}); name the folder of a vault that has been changed")
    try:
        with closing(Vault(DiskStorage(folder, read_only=read_only))) as vault:
            vault.report_damage()
            yield vault
    except OSError as error:
        raise RunError(f"{folder} cannot be read or written: {error.strerror or type(error).__name__}") from None
