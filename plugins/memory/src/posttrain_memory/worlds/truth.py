"""Reads the statements of a vault from its Markdown."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

from posttrain_memory.vault.links import Notes
from posttrain_memory.vault.paths import USER
from posttrain_memory.worlds.graph import Statement, distances, value_of
from posttrain_memory.worlds.theme import Attribute, Relation, Theme, plain_label, theme_named
from posttrain_memory.worlds.values import links, plain

_ABOUT = re.compile(
    r"\s*(?:[-*+]\s+)?(?:\*\*)?(?P<label>[^:*|\[\]]{1,60}?)\s+(?:of|for)\s+(?P<link>\[\[[^\[\]\n]+\]\])(?:\*\*)?\s*:\s*(?P<value>.+?)\s*$"
)
_LABEL = re.compile(
    r"\s*(?:[-*+]\s+)?(?:\*\*|__)?(?P<label>[^:*|\[\]]{1,60}?)(?:\*\*|__)?\s*:(?:\*\*|__)?\s*(?P<value>.+?)\s*$"
)
_ROW = re.compile(r"\s*\|\s*(?:\*\*)?(?P<label>[^|*\[\]]{1,60}?)(?:\*\*)?\s*\|\s*(?P<value>.*?)\s*\|\s*$")


@dataclass(frozen=True)
class Place:
    """The position of a statement: its note, the line or sentence (characters `start` to `end`), and the value in it."""

    statement: Statement
    start: int
    end: int
    value_start: int
    value_end: int


@dataclass(frozen=True)
class Parsed:
    """`titles`: path -> first heading; `out`: path -> linked notes; `broken`: links to nothing, as (path, target)."""

    titles: dict[str, str]
    places: tuple[Place, ...]
    out: dict[str, set[str]]
    broken: tuple[tuple[str, str], ...]

    @cached_property
    def statements(self) -> frozenset[Statement]:
        """All statements, without duplicates."""
        return frozenset(place.statement for place in self.places)

    @cached_property
    def reached(self) -> dict[str, int]:
        """Path -> minimum number of links from `user.md`, for all reachable notes."""
        return distances(self.out, USER)

    @cached_property
    def values(self) -> dict[str, set[str]]:
        """Key -> all values stated by any note."""
        values: dict[str, set[str]] = {}
        for statement in self.statements:
            values.setdefault(statement.key, set()).add(statement.value)
        return values

    def about(self, path: str, key: str) -> list[Place]:
        """The places where the fact or relation `key` of the note `path` is stated."""
        return [place for place in self.places if place.statement.about == path and place.statement.key == key]


def parse(files: Mapping[str, str], theme: str) -> Parsed:
    """Read a vault (path -> text) of a theme.

    A fact is a line `label: value` (also as a list item, in bold, or in front matter), a table row, or a sentence of
    the theme. A relation is the same with links. `label of [[note]]: value` is a fact of the linked note. Only labels
    and aliases of the theme count; other lines state nothing.
    """
    return _parse(tuple(sorted(files.items())), theme)


@lru_cache(maxsize=64)
def _parse(notes: tuple[tuple[str, str], ...], theme_name: str) -> Parsed:
    theme, index = theme_named(theme_name), Notes(path for path, _ in notes)
    titles = {path: title(text) for path, text in notes}
    named = {plain(name): path for path, name in titles.items()}
    places: list[Place] = []
    out: dict[str, set[str]] = {}
    broken = []
    for path, text in notes:
        out[path] = set()
        for _, _, target, _ in links(text):
            meant = index.resolve_or_none(target)
            if meant is None:
                broken.append((path, target))
            else:
                out[path].add(meant)
        start = 0
        for line in text.split("\n"):
            places += _line(theme, path, line, start, index, named)
            start += len(line) + 1
    return Parsed(titles, tuple(places), out, tuple(broken))


def title(text: str) -> str:
    """The first heading of a note, or ""."""
    match = re.search(r"^# +(.+?)\s*$", text, re.MULTILINE)
    return match.group(1) if match else ""


def _line(theme: Theme, path: str, line: str, start: int, index: Notes, named: Mapping[str, str]) -> list[Place]:
    if not line.strip() or line.startswith("#"):
        return []
    other = _ABOUT.match(line)
    for match, about in (
        (other, index.resolve_or_none(links(other["link"])[0][2]) if other else None),
        (_ROW.match(line) or _LABEL.match(line), path),
    ):
        if match and about is not None and plain_label(match["label"]) in theme.labels:
            return _stated(theme, path, about, match, theme.labels[plain_label(match["label"])], line, start, index)
    return _prose(theme, path, line, start, index, named)


def _stated(
    theme: Theme, path: str, about: str, match: re.Match[str], key: str, line: str, start: int, index: Notes
) -> list[Place]:
    """The statements of a line: one for a fact, one per link for a relation."""
    first, last = match.span("value")
    if key in theme.attributes:
        statement = Statement(path, about, key, value_of(theme, key, match["value"]))
        return [Place(statement, start, start + len(line), start + first, start + last)]
    places = []
    for begin, end, target, _ in links(match["value"]):
        meant = index.resolve_or_none(target)
        statement = Statement(path, about, key, meant or f"?{target}")
        places.append(Place(statement, start, start + len(line), start + first + begin, start + first + end))
    if not places:
        statement = Statement(path, about, key, f"?{match['value']}")
        places.append(Place(statement, start, start + len(line), start + first, start + last))
    return places


def _prose(theme: Theme, path: str, line: str, start: int, index: Notes, named: Mapping[str, str]) -> list[Place]:
    places = []
    begins = [match.end() for match in re.finditer(r"^\s*(?:[-*+] )?|[.!?] +", line)]
    for key, of_user, literal, pattern in _sentences(theme.name):
        if literal not in line or (of_user and path != USER):
            continue
        for match in filter(None, (pattern.match(line, begin) for begin in begins)):
            about = path if of_user else named.get(plain(match["name"]))
            if about is None or (key not in theme.attributes and not links(match["value"])):
                continue
            for place in _stated(theme, path, about, match, key, line, start, index):
                first, last = match.span()
                places.append(Place(place.statement, start + first, start + last, place.value_start, place.value_end))
    return places


@cache
def _sentences(theme_name: str) -> list[tuple[str, bool, str, re.Pattern[str]]]:
    """For each sentence of a theme: its key, whether it belongs to `user.md`, a literal part of it, and its pattern."""
    theme = theme_named(theme_name)
    items: list[Attribute | Relation] = [*theme.all_facts, *theme.relations]
    texts = dict.fromkeys((item.key, item.sentence) for item in items)
    sentences = []
    for key, text in texts:
        literal = max(re.split(r"\{name\}|\{value\}", text.removesuffix(".")), key=len)
        pattern = re.escape(text.removesuffix("."))
        pattern = pattern.replace(r"\{name\}", r"(?P<name>[^\n.!?|\[\]]{1,80}?)")
        pattern = pattern.replace(r"\{value\}", r"(?P<value>(?:(?!\.\s)[^\n])+?)")
        sentences.append((key, "{name}" not in text, literal, re.compile(rf"{pattern}\.(?=\s|$)")))
    return sentences
