"""Wikilinks: `[[note]]`, `[[folder/note.md#heading|alias]]`, with or without `.md` and folder."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from posttrain_memory.vault.limits import VaultError, quoted
from posttrain_memory.vault.paths import SUFFIX, case_key

_LINK = re.compile(r"\[\[([^\[\]\n]{1,400})\]\]")
_MARK = re.compile(r"#|\\?\|")
"""The end of a link's target."""
_FENCE = re.compile(r"[ ]{0,3}(`{3,}|~{3,})")


@dataclass(frozen=True)
class Link:
    """The parts of a link. `heading` and `alias` are None if absent. An empty target means the note itself."""

    target: str
    heading: str | None = None
    alias: str | None = None

    def __str__(self) -> str:
        heading = "" if self.heading is None else f"#{self.heading}"
        alias = "" if self.alias is None else f"|{self.alias}"
        return f"[[{self.target}{heading}{alias}]]"


def parse_link(text: str) -> Link:
    """Split a link, with or without its brackets. Raises VaultError if it has no target."""
    inner = text.strip().removeprefix("!")
    if inner.startswith("[[") and inner.endswith("]]"):
        inner = inner[2:-2]
    if not inner.strip() or len(inner) > 400 or any(c in inner for c in "[]\n"):
        raise VaultError(f"{quoted(text)} is not a link: write [[note]]")
    return _parts(inner)


def targets(text: str) -> frozenset[str]:
    """The targets of all links of a note."""
    return frozenset(_parts(inner).target for inner in set(_LINK.findall(text)))


class Notes:
    """An index of note paths for resolving link targets."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = set(paths)
        self._by_name: dict[str, list[tuple[str, str]]] = {}
        for path in sorted(self._paths):
            key = case_key(path)
            self._by_name.setdefault(key.rpartition("/")[2], []).append((key, path))

    def resolve(self, target: str) -> str:
        """The path that a link target refers to: an exact match, otherwise the only note whose path ends with it.
        Case is ignored if no path matches exactly.

        Raises VaultError if there is no such note, or more than one.
        """
        matches = self._candidates(target)
        link = quoted(f"[[{target.strip().removeprefix('./')}]]")
        if not matches:
            raise VaultError(f"no note fits the link {link}", "FileNotFoundError")
        if len(matches) > 1:
            raise VaultError(f"{len(matches)} notes fit the link {link}; write its whole path")
        return matches[0]

    def resolve_or_none(self, target: str) -> str | None:
        """Like `resolve`, but None for no note or several."""
        matches = self._candidates(target) if target else []
        return matches[0] if len(matches) == 1 else None

    def _candidates(self, target: str) -> list[str]:
        named = _path(target)
        if named in self._paths:
            return [named]
        wanted_key = case_key(named)
        near = self._by_name.get(wanted_key.rpartition("/")[2], [])
        return [path for key, path in near if key == wanted_key] or [
            path for key, path in near if key.endswith(f"/{wanted_key}")
        ]


class Backlinks:
    """Which notes link to which. The targets of a note are cached until its text changes."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._by_name: dict[str, dict[str, list[str]]] = {}
        """Note -> last component of each link target (case-folded) -> the full targets."""

    def to(self, path: str, paths: Iterable[str], files: dict[str, str]) -> list[str]:
        """The notes that link to `path`, sorted. `paths` are all notes, `files` the texts of the readable ones."""
        for other in self._texts.keys() - files.keys():
            del self._by_name[other]
        for other, text in files.items():
            if self._texts.get(other) != text:
                by_name: dict[str, list[str]] = {}
                for target in targets(text):
                    by_name.setdefault(case_key(_path(target)).rpartition("/")[2], []).append(target)
                self._by_name[other] = by_name
        self._texts = dict(files)
        notes, name = Notes(paths), case_key(path).rpartition("/")[2]
        return [
            other
            for other in sorted(files)
            if other != path
            and any(notes.resolve_or_none(target) == path for target in self._by_name[other].get(name, ()))
        ]


def section(text: str, heading: str) -> str | None:
    """The section under a heading, up to the next heading of the same or a higher level. None if there is none."""
    wanted = case_key(heading.rpartition("#")[2].strip())
    lines = text.splitlines(keepends=True)
    begin, level, fence = None, 0, ""
    for number, line in enumerate(lines):
        mark = _FENCE.match(line)
        if mark and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1]
        heading_here = None if fence or mark else _heading(line.rstrip("\r\n"))
        if not heading_here:
            continue
        if begin is None and case_key(heading_here[1]) == wanted:
            begin, level = number, heading_here[0]
        elif begin is not None and heading_here[0] <= level:
            return "".join(lines[begin:number])
    return None if begin is None else "".join(lines[begin:])


def rewrite_links(text: str, old: str, new: str, before: Notes, after: Notes) -> str:
    """`text` with links rewritten so that they keep their notes after the note `old` has moved to `new`.

    A link to the moved note keeps its heading and alias, and keeps or omits the suffix and the folder as before,
    unless that would be ambiguous. A link to another note is expanded to its full path if the new name makes it
    ambiguous.
    """

    names = [case_key(path).rpartition("/")[2].removesuffix(SUFFIX) for path in (old, new)]

    @cache
    def rewritten(inner: str) -> str:
        # Only a link that contains the old or the new name can change its target, so most links are skipped here.
        if inner.isascii() and not any(name in inner.lower() for name in names):
            return f"[[{inner}]]"
        link = _parts(inner)
        led = before.resolve_or_none(link.target)
        wanted = new if led == old else led
        if wanted is None or (led != old and after.resolve_or_none(link.target) == wanted):
            return f"[[{inner}]]"
        short = led == old and "/" not in link.target and "/" in old
        target = wanted.rpartition("/")[2] if short else wanted
        target = target if link.target.endswith(SUFFIX) else target.removesuffix(SUFFIX)
        if after.resolve_or_none(target) != wanted:
            target = wanted
        # The rest of the link stays as written, including an escaped bar in a table.
        end = _MARK.search(inner)
        place = end.start() if end else len(inner)
        return f"[[{target}{inner[len(inner[:place].rstrip()) :] if end else ''}]]"

    return _LINK.sub(lambda match: rewritten(match[1]), text)


def _path(target: str) -> str:
    """The path that a link target spells, with the suffix of a note."""
    wanted = target.strip().removeprefix("./")
    return wanted if wanted.endswith(SUFFIX) else wanted + SUFFIX


def _heading(line: str) -> tuple[int, str] | None:
    """Level and text of the heading on this line, without closing `#` characters; None if it is not a heading."""
    words = line.lstrip("#")
    level = len(line) - len(words)
    if not 1 <= level <= 6 or not words.startswith((" ", "\t")):
        return None
    return level, words.rstrip(" \t").rstrip("#").strip(" \t")


def _parts(inner: str) -> Link:
    # Inside a table, the bar before an alias is escaped with a backslash.
    place, bar, alias = inner.replace("\\|", "|").partition("|")
    target, hash_, heading = place.partition("#")
    return Link(target.strip(), heading.strip() if hash_ else None, alias.strip() if bar else None)
