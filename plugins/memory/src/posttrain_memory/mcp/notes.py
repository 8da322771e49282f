"""Read access of MCP clients to a vault: list, search and read notes, through the privacy rules."""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Lock

from posttrain.environments.untrusted import sanitize
from posttrain.errors import InputError
from posttrain_memory.privacy.filter import PrivacyFilter
from posttrain_memory.vault.limits import VaultError, VaultLimits
from posttrain_memory.vault.paths import USER
from posttrain_memory.vault.storage import DiskStorage, MemoryStorage
from posttrain_memory.vault.tools import tools
from posttrain_memory.vault.vault import Vault

PIECE = 16_000
"""Maximum number of characters of a note that one call returns."""
_NOTHING = "the privacy rules of this memory hide everything, for one of them is not understood"
_NO_SUCH = "the rules of this memory show no such note"
_NOT_SO = (
    "this cannot be read or searched for under the privacy rules of this memory; "
    "give the path of a note that is listed, a [[note#heading]] of one, or a short text to search for"
)


class SharedNotes:
    """The notes in the folder `root`, opened read-only for each call, without a lock in between. Thread-safe.

    All returned text is neutralized (`sanitize`). Methods raise VaultError with one sentence that names neither
    paths of the host nor hidden facts, or InputError if the folder itself is at fault.
    """

    def __init__(self, root: Path, rules: Sequence[str] = (), limits: VaultLimits | None = None) -> None:
        """`rules` are privacy rules that apply to every call."""
        self.root, self.rules = root, tuple(rules)
        self._limits = limits or VaultLimits()
        self._lock = Lock()
        self._known: tuple[dict[str, str], PrivacyFilter] | None = None

    def list(self) -> str:
        """The tree of all notes, at most `VaultLimits.tree_lines` lines."""
        with self._open() as (vault, rules):
            return self._redacted(vault.tree(), rules) or "there are no notes"

    def search(self, text: str) -> str:
        """At most `VaultLimits.search_hits` lines that contain `text` (case-insensitive), as `path:line: text`."""
        with self._open() as (vault, rules):
            hits = tools(vault)["search_files"](text)
            assert isinstance(hits, list)
            return self._redacted("\n".join(hits), rules) or "no line of a note holds this text"

    def read(self, path: str, start: int = 0) -> str:
        """At most `PIECE` characters of a note from character `start`, and a line that says how to continue.

        `path` is the path of a note, or a link in brackets such as `[[note#heading]]`.
        """
        with self._open() as (vault, rules):
            text = vault.follow(path) if path.lstrip().startswith("[[") else vault.read(path)
            text = self._redacted(text, rules)
        if start and start >= len(text):
            raise VaultError(f"the note has {len(text)} characters; begin before its end")
        rest = len(text) - start - PIECE
        more = f"\n… {rest} more characters; read again with start={start + PIECE}" if rest > 0 else ""
        return text[start : start + PIECE] + more or "the note is empty"

    def check(self, writable: bool) -> None:
        """InputError if the folder is not a vault, a rule is not understood, or `writable` and it is not."""
        try:
            with self._open(strict=False) as (_, rules):
                problem = rules.problem if rules is not None else None
        except VaultError as error:
            raise InputError(f"{self.root} cannot be used with privacy rules: {error.__cause__ or error}") from None
        if problem is not None:
            raise InputError(f"the privacy rule “{problem.sentence}” is not understood ({problem.reason}); rephrase it")
        with closing(DiskStorage(self.root, read_only=True)) as storage:
            if USER not in storage.sizes():
                raise InputError(f"{self.root} has no user.md, so it is not a vault; create user.md first")
        if writable and not os.access(self.root, os.W_OK | os.X_OK):
            raise InputError(f"{self.root} is not writable; use --read-only")

    def safe(self, text: str) -> str:
        """`text`, written by the agent, redacted for a client."""
        with self._open() as (_, rules):
            return self._redacted(text, rules)

    def view(self) -> dict[str, str]:
        """Path -> text of every note, as seen under the rules."""
        with self._open() as (vault, rules):
            return vault.files() if rules is None else dict(rules.view)

    @contextmanager
    def _open(self, strict: bool = True) -> Iterator[tuple[Vault, PrivacyFilter | None]]:
        """The vault as seen under the rules, and the rules. `strict`: VaultError if they are not understood."""
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
                # The message does not depend on what the client asked for, so a correct guess looks like a wrong one.
                raise VaultError(_NO_SUCH if error.kind == "FileNotFoundError" else _NOT_SO, error.kind) from None
        finally:
            vault.close()

    def _filter(self, vault: Vault) -> PrivacyFilter:
        """The rules applied to the current notes; recomputed only after a note has changed."""
        try:
            files = vault.files()
        except VaultError as error:
            # The note's name may be hidden, so the message omits it.
            why = "a note cannot be read, so the privacy rules cannot be kept and nothing is shown"
            raise VaultError(why) from error
        with self._lock:
            if self._known is None or self._known[0] != files:
                self._known = files, PrivacyFilter(self.rules, files)
            return self._known[1]

    def _redacted(self, text: str, rules: PrivacyFilter | None) -> str:
        # Zero-width characters are removed first, because they could split a value so that it is not found.
        plain = sanitize(text).strip("\n")
        return plain if rules is None else rules.clean(plain)
