"""Wikilinks: `[[note]]`, `[[folder/note.md#heading|alias]]`, with or without `.md` and folder."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from posttrain.environments.memory.limits import VaultError, shown
from posttrain.environments.memory.paths import SUFFIX, same

_LINK = re.compile(r"\[\[([^\[\]\n]{1,400})\]\]")
_HEADING = re.compile(r"(#{1,6})[ \t]+(.*?)[ \t]*#*[ \t]*$")
_FENCE = re.compile(r"[ ]{0,3}(`{3,}|~{3,})")


@dataclass(frozen=True)
class Link:
    """The parts of a link. `heading` and `alias` are None where the link has none; "" is this very note."""

    target: str
    heading: str | None = None
    alias: str | None = None

    def __str__(self) -> str:
        heading = "" if self.heading is None else f"#{self.heading}"
        alias = "" if self.alias is None else f"|{self.alias}"
        return f"[[{self.target}{heading}{alias}]]"


def parse_link(text: str) -> Link:
    """The parts of a link, given with or without its brackets. VaultError where there is no target."""
    inner = text.strip().removeprefix("!")
    if inner.startswith("[[") and inner.endswith("]]"):
        inner = inner[2:-2]
    if not inner.strip() or len(inner) > 400 or any(c in inner for c in "[]\n"):
        raise VaultError(f"{shown(text)} is no link: write [[note]]")
    return _parts(inner)


def links(text: str) -> list[Link]:
    """All links of a note, in order."""
    return [_parts(match[1]) for match in _LINK.finditer(text)]


class Notes:
    """The paths of the notes of a vault, arranged so that a link's target is found at once."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = set(paths)
        self._by_name: dict[str, list[tuple[str, str]]] = {}
        for path in sorted(self._paths):
            key = same(path)
            self._by_name.setdefault(key.rpartition("/")[2], []).append((key, path))

    def resolve(self, target: str) -> str:
        """The one path that a link's target means: exact, else the only note with that end of its path.

        VaultError where there is none, or more than one. Case does not count where no path is exact.
        """
        wanted = target.strip().removeprefix("./")
        named = wanted if wanted.endswith(SUFFIX) else wanted + SUFFIX
        if named in self._paths:
            return named
        wanted_key = same(named)
        near = self._by_name.get(wanted_key.rpartition("/")[2], [])
        found = [path for key, path in near if key == wanted_key] or [
            path for key, path in near if key.endswith(f"/{wanted_key}")
        ]
        if not found:
            raise VaultError(f"no note fits the link {shown(f'[[{wanted}]]')}", "FileNotFoundError")
        if len(found) > 1:
            raise VaultError(f"{len(found)} notes fit the link {shown(f'[[{wanted}]]')}; write its whole path")
        return found[0]

    def leads(self, target: str) -> str | None:
        """As `resolve`, None where there is none or more than one."""
        try:
            return self.resolve(target) if target else None
        except VaultError:
            return None


def resolve(target: str, paths: Iterable[str]) -> str:
    """`Notes.resolve` for one link."""
    return Notes(paths).resolve(target)


def section(text: str, heading: str) -> str | None:
    """The part of a note under a heading, that line included, up to the next heading as high; None without it."""
    wanted = same(heading.rpartition("#")[2].strip())
    lines = text.splitlines(keepends=True)
    begin, level, fence = None, 0, ""
    for number, line in enumerate(lines):
        mark = _FENCE.match(line)
        if mark and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1]
        match = None if fence or mark else _HEADING.match(line.rstrip("\r\n"))
        if not match:
            continue
        if begin is None and same(match[2]) == wanted:
            begin, level = number, len(match[1])
        elif begin is not None and len(match[1]) <= level:
            return "".join(lines[begin:number])
    return None if begin is None else "".join(lines[begin:])


def mended(text: str, old: str, new: str, before: Notes, after: Notes) -> str:
    """`text` with links turned so that they lead where they led when the note `old` becomes `new`.

    A link to it keeps its heading, its alias, its `.md` or none, and its folder or none where that stays unambiguous.
    A link to another note is turned into its whole path where the new name makes it ambiguous.
    """

    def turned(match: re.Match[str]) -> str:
        link = _parts(match[1])
        led = before.leads(link.target)
        wanted = new if led == old else led
        if wanted is None or (led != old and after.leads(link.target) == wanted):
            return match[0]
        short = led == old and "/" not in link.target and "/" in old
        target = wanted.rpartition("/")[2] if short else wanted
        target = target if link.target.endswith(SUFFIX) else target.removesuffix(SUFFIX)
        if after.leads(target) != wanted:
            target = wanted
        # What follows the target stays as it was written, an escaped bar of a table among it.
        rest = re.search(r"\s*(#|\\?\|).*", match[1])
        return f"[[{target}{rest[0] if rest else ''}]]"

    return _LINK.sub(turned, text)


def _parts(inner: str) -> Link:
    # In a table the bar of an alias is written with a backslash.
    place, bar, alias = inner.replace("\\|", "|").partition("|")
    target, hash_, heading = place.partition("#")
    return Link(target.strip(), heading.strip() if hash_ else None, alias.strip() if bar else None)
