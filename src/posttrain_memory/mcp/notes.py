"""What a client of the MCP server may read of a vault: its list of notes, a search, a note, through the privacy rules."""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Lock

from posttrain.environments.untrusted import sanitize
from posttrain.errors import InputError
from posttrain_memory.interpreter.tools import tools
from posttrain_memory.privacy.filter import Filter
from posttrain_memory.vault.limits import VaultError, VaultLimits
from posttrain_memory.vault.storage import DiskStorage, MemoryStorage
from posttrain_memory.vault.vault import Vault

PIECE = 16_000
"""Most characters of a note that one call shows."""
_NOTHING = "the privacy rules of this memory hide everything, for one of them is not understood"
_NO_SUCH = "the rules of this memory show no such note"
_NOT_SO = (
    "this cannot be read or searched for under the privacy rules of this memory; "
    "give the path of a note that is listed, a [[note#heading]] of one, or a short text to search for"
)


class SharedNotes:
    """The notes of the folder `root`, opened for reading alone, anew for each call, so that no lock is held between.

    Every method gives text that is safe to show (`sanitize`), and raises VaultError with one sentence that names nothing
    of the host and nothing that the rules hide, or InputError where the folder itself is at fault. Threads may call.
    """

    def __init__(self, root: Path, rules: Sequence[str] = (), limits: VaultLimits | None = None) -> None:
        """`rules` are the user's standing privacy rules; they hold for every call."""
        self.root, self.rules = root, tuple(rules)
        self._limits = limits or VaultLimits()
        self._lock = Lock()
        self._known: tuple[dict[str, str], Filter] | None = None

    def list(self) -> str:
        """The tree of all notes, at most `VaultLimits.tree_lines` lines."""
        with self._opened() as (vault, rules):
            return self._shown(vault.tree(), rules) or "there are no notes"

    def search(self, text: str) -> str:
        """The lines that hold `text` in any case, as `path:line: text`, at most `VaultLimits.search_hits` of them."""
        with self._opened() as (vault, rules):
            found = tools(vault)["search_files"](text)
            assert isinstance(found, list)
            return self._shown("\n".join(found), rules) or "no line of a note holds this text"

    def read(self, path: str, start: int = 0) -> str:
        """The text of a note from character `start`, at most `PIECE` of them and a line that says how to go on.

        `path`: that of a note, or a link in its brackets, `[[note#heading]]`.
        """
        with self._opened() as (vault, rules):
            text = vault.follow(path) if path.lstrip().startswith("[[") else vault.read(path)
            text = self._shown(text, rules)
        if start and start >= len(text):
            raise VaultError(f"the note has {len(text)} characters; begin before its end")
        rest = len(text) - start - PIECE
        more = f"\n… {rest} more characters; read again with start={start + PIECE}" if rest > 0 else ""
        return text[start : start + PIECE] + more or "the note is empty"

    def check(self, writable: bool) -> None:
        """InputError where the folder is no memory, a standing rule is not understood, or nothing can be written."""
        try:
            with self._opened(strict=False) as (_, rules):
                problem = rules.problem if rules is not None else None
        except VaultError as error:
            raise InputError(f"{self.root} cannot be used with privacy rules: {error.__cause__ or error}") from None
        if problem is not None:
            raise InputError(
                f"the privacy rule “{problem.sentence}” is not understood ({problem.reason}); write it in other words"
            )
        with closing(DiskStorage(self.root, read_only=True)) as storage:
            if "user.md" not in storage.sizes():
                raise InputError(f"{self.root} has no user.md, so it is no memory; make one about the user first")
        if writable and not os.access(self.root, os.W_OK | os.X_OK):
            raise InputError(f"{self.root} cannot be written; give --read-only")

    def safe(self, text: str) -> str:
        """`text`, which the agent wrote, as a client may see it."""
        with self._opened() as (_, rules):
            return self._shown(text, rules)

    def view(self) -> dict[str, str]:
        """Path -> text of every note, as the standing rules show it."""
        with self._opened() as (vault, rules):
            return vault.files() if rules is None else dict(rules.view)

    @contextmanager
    def _opened(self, strict: bool = True) -> Iterator[tuple[Vault, Filter | None]]:
        """The vault as the rules show it, and the rules; `strict`: VaultError where they are not understood."""
        vault = Vault(DiskStorage(self.root, read_only=True), self._limits)
        try:
            if not self.rules:
                yield vault, None
                return
            rules = self._filter(vault)
            if strict and rules.problem is not None:
                raise VaultError(_NOTHING, "PermissionError")
            try:
                yield Vault(MemoryStorage(rules.view), self._limits), rules
            except VaultError as error:
                # What the client asked for is neither repeated nor looked through: a right guess reads as a wrong one.
                raise VaultError(_NO_SUCH if error.kind == "FileNotFoundError" else _NOT_SO, error.kind) from None
        finally:
            vault.close()

    def _filter(self, vault: Vault) -> Filter:
        """The rules over the notes as they are now; made again only where a note has changed."""
        try:
            files = vault.files()
        except VaultError as error:
            # Its name may be hidden, so it is not told here.
            why = "a note cannot be read, so the privacy rules cannot be kept and nothing is shown"
            raise VaultError(why) from error
        with self._lock:
            if self._known is None or self._known[0] != files:
                self._known = files, Filter(self.rules, files)
            return self._known[1]

    def _shown(self, text: str, rules: Filter | None) -> str:
        # Signs without width go first: they could part a value so that it is not found.
        plain = sanitize(text).strip("\n")
        return plain if rules is None else rules.clean(plain)
