"""A vault: Markdown notes that a model reads and changes within limits, with every change recorded in a journal."""

import re
import sys
from threading import RLock

from posttrain_memory.vault.journal import Change, Journal
from posttrain_memory.vault.limits import VaultError, VaultLimits, quoted
from posttrain_memory.vault.links import Backlinks, Notes, parse_link, rewrite_links, section
from posttrain_memory.vault.paths import case_key, collision, folder_path, note_path
from posttrain_memory.vault.storage import Storage
from posttrain_memory.vault.text import Hit, replace_span, search, tree, with_line_feeds

_QUERY = 200
"""Maximum length of a search text, in characters."""
_MANY = 100
"""Occurrences of a text are counted up to this number; one more means "more"."""


class Vault:
    """The notes of `storage` under `limits`.

    Every method either succeeds completely or raises VaultError with one short sentence. Paths are relative to the
    vault and end in `.md`. Folders exist as long as they contain notes.
    """

    def __init__(self, storage: Storage, limits: VaultLimits | None = None) -> None:
        self.limits = limits or VaultLimits()
        self.journal = Journal(storage, self.limits.journal_entries)
        self._storage = storage
        self._lock = RLock()
        self._backlinks = Backlinks()

    def report_damage(self) -> None:
        """Print the journal's warning on stderr, if there is one."""
        if self.journal.warning:
            print(f"posttrain: {self.journal.warning}", file=sys.stderr, flush=True)

    def create(self, path: str, content: str = "") -> None:
        """Create a note. Raises VaultError if it exists, also with different case."""
        with self._lock:
            clean = note_path(path, self.limits)
            self._free(clean)
            self._commit("create", Change(clean, None, _text(content)))

    def read(self, path: str) -> str:
        """The text of a note."""
        clean = note_path(path, self.limits)
        text = self._storage.read(clean, self.limits.file_bytes)
        if text is None:
            name = case_key(clean.rpartition("/")[2])
            near = [known for known in self._storage.sizes() if case_key(known).rpartition("/")[2] == name]
            hint = f"; there is {quoted(near[0])}" if len(near) == 1 else ""
            raise VaultError(f"there is no note {quoted(clean)}{hint}", "FileNotFoundError")
        return text

    def update(self, path: str, old: str, new: str) -> None:
        """Replace `old`, which must occur in the note exactly once, by `new`. The note keeps its kind of line breaks."""
        with self._lock:
            before = self.read(path)
            clean = note_path(path, self.limits)
            if not _text(old):
                raise VaultError("the old text is empty; use append_file to add text")
            wanted, lines = with_line_feeds(old), with_line_feeds(before)
            count = _count(lines, wanted)
            if not count:
                raise VaultError(f"the old text is not in {quoted(clean)}; read the note and copy it exactly")
            if count > 1:
                often = f"{count} times" if count <= _MANY else f"more than {_MANY} times"
                raise VaultError(f"the old text is {often} in {quoted(clean)}; give more of its surroundings")
            if wanted == with_line_feeds(_text(new)):
                raise VaultError("the old text and the new text are the same")
            at = lines.index(wanted)
            self._commit("update", Change(clean, before, replace_span(before, at, at + len(wanted), new)))

    def append(self, path: str, text: str) -> None:
        """Append `text` to a note, on a new line."""
        with self._lock:
            before = self.read(path)
            if not _text(text):
                raise VaultError("the text to append is empty")
            lines = with_line_feeds(before)
            gap = "" if not lines or lines.endswith("\n") else "\n"
            after = replace_span(before, len(lines), len(lines), gap + text)
            self._commit("append", Change(note_path(path, self.limits), before, after))

    def delete(self, path: str) -> None:
        """Delete a note. Links to it are kept."""
        with self._lock:
            self._commit("delete", Change(note_path(path, self.limits), self.read(path), None))

    def move(self, path: str, to: str) -> int:
        """Move a note; links in all notes keep their targets. Returns the number of other notes that were rewritten."""
        with self._lock:
            text, old, new = self.read(path), note_path(path, self.limits), note_path(to, self.limits)
            self._free(new, without=old)
            known = set(self._storage.sizes())
            before, after = Notes(known), Notes(known - {old} | {new})
            changed = []
            for other, content in sorted(self._readable().items()):
                turned = rewrite_links(content, old, new, before, after) if other != old else content
                if turned != content:
                    changed.append(Change(other, content, turned))
            # The old note is removed first: on a case-insensitive file system both paths may be one file.
            moved = [Change(old, text, None), Change(new, None, rewrite_links(text, old, new, before, after))]
            self._commit("move", *changed, *moved)
            return len(changed)

    def exists(self, path: str) -> bool:
        """Whether the note exists, or the folder with at least one note in it."""
        clean = folder_path(path, self.limits)
        return not clean or any(known == clean or known.startswith(f"{clean}/") for known in self._storage.sizes())

    def size(self, path: str = "") -> int:
        """Size in bytes of a note, of all notes in a folder, or of the whole vault ("")."""
        clean = folder_path(path, self.limits)
        sizes = self._storage.sizes()
        matching = [n for known, n in sizes.items() if not clean or known == clean or known.startswith(f"{clean}/")]
        if clean and not matching:
            raise VaultError(f"there is no note or folder {quoted(clean)}", "FileNotFoundError")
        return sum(matching)

    def tree(self) -> str:
        """All notes and folders, one per line."""
        return tree(self._storage.sizes(), self.limits.tree_lines)

    def search(self, text: str) -> tuple[list[Hit], int]:
        """The first lines that contain `text` (case-insensitive), and the number of all such lines."""
        if not isinstance(text, str) or not text.strip():
            raise VaultError("the text to search for is empty")
        if len(text) > _QUERY:
            raise VaultError(f"the text to search for is longer than {_QUERY} characters")
        return search(self._readable(), text, self.limits.search_hits, self.limits.snippet_chars)

    def follow(self, link: str) -> str:
        """The text of `[[note]]`, `[[note|alias]]` or `[[note#heading]]`; the brackets are optional."""
        if not isinstance(link, str):
            raise VaultError("a link is a text", "TypeError")
        parts = parse_link(link)
        if not parts.target:
            raise VaultError(f"{quoted(link)} names no note")
        path = self.resolve(parts.target)
        text = self.read(path)
        if parts.heading is None:
            return text
        under = section(text, parts.heading)
        if under is None:
            raise VaultError(f"{quoted(path)} has no heading {quoted(parts.heading)}")
        return under

    def resolve(self, target: str) -> str:
        """The path of the note that a link target refers to."""
        return Notes(self._storage.sizes()).resolve(target)

    def backlinks(self, path: str) -> list[str]:
        """The notes that link to a note, sorted by path."""
        clean = note_path(path, self.limits)
        self.read(clean)
        with self._lock:
            return self._backlinks.to(clean, self._storage.sizes(), self._readable())

    def paths(self) -> list[str]:
        """The paths of all notes, sorted."""
        return sorted(self._storage.sizes())

    def files(self) -> dict[str, str]:
        """Path -> text of every note, sorted by path. Raises VaultError if one cannot be read."""
        return {path: self.read(path) for path in self.paths()}

    def close(self) -> None:
        """Release files and locks."""
        self.journal.close()
        self._storage.close()

    def _readable(self) -> dict[str, str]:
        """Path -> text of every note that can be read: a search must not fail because of others."""
        texts = {}
        for path in self._storage.sizes():
            try:
                text = self._storage.read(path, self.limits.file_bytes)
            except VaultError:
                continue
            if text is not None:
                texts[path] = text
        return texts

    def _free(self, path: str, without: str | None = None) -> None:
        known = self._storage.sizes()
        if path in known:
            raise VaultError(f"{quoted(path)} exists already; use update_file or append_file", "FileExistsError")
        # A note that changes only the case of its own name does not conflict with itself.
        other = collision(path, (other for other in known if other != without))
        if other:
            raise VaultError(
                f"{quoted(path)} cannot exist beside {quoted(other)}, which it differs from too little",
                "FileExistsError",
            )
        # On disk, something other than a note may have this path; reading it raises.
        self._storage.read(path, self.limits.file_bytes)

    def _commit(self, operation: str, *changes: Change) -> None:
        sizes = dict(self._storage.sizes())
        grows = sum(len((c.after or "").encode()) - len((c.before or "").encode()) for c in changes)
        for change in changes:
            size = len((change.after or "").encode())
            if change.after is not None and size > self.limits.file_bytes:
                raise VaultError(
                    f"{quoted(change.path)} would have {size} bytes; a note may have {self.limits.file_bytes}",
                    "OSError",
                )
        count = len(sizes) + sum((c.before is None) - (c.after is None) for c in changes)
        # A vault that already exceeds its limits, such as an imported one, can still shrink.
        if count > self.limits.files and count > len(sizes):
            raise VaultError(f"the memory may hold {self.limits.files} notes; delete one first", "OSError")
        if sum(sizes.values()) + grows > self.limits.total_bytes and grows > 0:
            raise VaultError(f"the memory may hold {self.limits.total_bytes} bytes; delete something first", "OSError")
        self.journal.commit(operation, changes)


def _text(content: object) -> str:
    if not isinstance(content, str):
        raise VaultError("the content of a note is a text", "TypeError")
    if re.search("[\0\ud800-\udfff]", content):
        raise VaultError("a note may not hold characters that are not text")
    return content


def _count(text: str, piece: str) -> int:
    """The number of occurrences of `piece` in `text`, overlapping ones included, at most `_MANY` + 1.

    Half of a long text of one repeated letter occurs at thousands of places.
    """
    count, at = 0, text.find(piece)
    while at >= 0 and count <= _MANY:
        count, at = count + 1, text.find(piece, at + 1)
    return count
