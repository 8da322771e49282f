"""The facts that the notes of a vault state, with their character positions, where privacy rules hide them."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from posttrain_memory.vault.links import Notes
from posttrain_memory.vault.paths import USER
from posttrain_memory.worlds.theme import Theme, plain_label, themes
from posttrain_memory.worlds.truth import parse, title
from posttrain_memory.worlds.values import canonical, links

_LABELLED = re.compile(
    r"\s*(?:[-*+]\s+|\d+[.)]\s+)?(?:\*\*|__)?(?P<label>[^:*|\[\]\n]{1,60}?)"
    r"(?:\s+(?:of|for)\s+(?P<link>\[\[[^\[\]\n]+\]\]))?(?:\*\*|__)?\s*:(?:\*\*|__)?\s*(?P<value>\S(?:.*\S)?)\s*$"
)
_ROW = re.compile(r"\s*\|\s*(?:\*\*)?(?P<label>[^|*\[\]\n]{1,60}?)(?:\*\*)?\s*\|\s*(?P<value>(?:.*\S)?)\s*\|\s*$")
_KINDS = ("email", "date", "money", "phone", "number")


@dataclass(frozen=True)
class Fact:
    """One statement in the note `note`: `label` of the note `about` is `value`.

    `labels` are the plain label and its synonyms. `kind` is a type of value, or `link` if `value` is the path of a
    note. The statement spans characters `start` to `end` of its note, the value `value_start` to `value_end`.
    """

    note: str
    about: str
    labels: frozenset[str]
    kind: str
    value: str
    start: int
    end: int
    value_start: int
    value_end: int


def facts_of(files: Mapping[str, str], theme: str | None = None) -> list[Fact]:
    """The facts of a vault (path -> text): labeled lines and, with a known theme, the sentences of that theme."""
    known = list(_themed(files, themes()[theme])) if theme in themes() else []
    taken = {(fact.note, place) for fact in known for place in range(fact.value_start, fact.value_end)}
    others = [fact for fact in _labeled(files) if (fact.note, fact.value_start) not in taken]
    return [*known, *others]


def names_of(files: Mapping[str, str]) -> dict[str, str]:
    """Lower-case name -> path, from the titles and file names of notes."""
    paths = {}
    for path, text in files.items():
        if path != USER:
            stem = path.removesuffix(".md").rsplit("/", 1)[-1]
            paths[" ".join(re.sub(r"[_-]+", " ", stem).casefold().split())] = path
        if title(text):
            paths[" ".join(title(text).casefold().split())] = path
    return {name: path for name, path in paths.items() if name}


def _themed(files: Mapping[str, str], theme: Theme) -> Iterable[Fact]:
    for place in parse(files, theme.name).places:
        note, about, key, value = place.statement
        attribute = theme.attributes.get(key)
        if attribute is not None:
            labels, kind = {attribute.label, *attribute.aliases}, str(attribute.type)
        else:
            relation, kind = theme.relation(key), "link"
            inverse = {relation.inverse, relation.inverse_plural}
            labels = inverse if key.endswith("~") else {relation.label, relation.plural}
        kind = "text" if value.startswith("?") else kind
        spans = place.start, place.end, place.value_start, place.value_end
        yield Fact(note, about, frozenset(map(plain_label, labels)), kind, value.removeprefix("?"), *spans)


def _labeled(files: Mapping[str, str]) -> Iterable[Fact]:
    resolve_or_none = Notes(files).resolve_or_none
    for path, text in files.items():
        start = 0
        for line in text.split("\n"):
            # The patterns take long for a line of spaces.
            match = _ROW.match(line) if "|" in line else None
            if match is None and ":" in line and not line.lstrip().startswith("#"):
                match = _LABELLED.match(line)
            if match:
                yield from _of_line(path, match, line, start, resolve_or_none)
            start += len(line) + 1


def _of_line(
    path: str, match: re.Match[str], line: str, start: int, resolve_or_none: Callable[[str], str | None]
) -> Iterable[Fact]:
    link = match.groupdict().get("link")
    about = (resolve_or_none(links(link)[0][2]) if link else None) or path
    labels, (first, last) = frozenset([plain_label(match["label"])]), match.span("value")
    end = start + len(line)
    for begin, stop, target, _ in links(match["value"]):
        value = resolve_or_none(target) or target
        yield Fact(path, about, labels, "link", value, start, end, start + first + begin, start + first + stop)
    if links(match["value"]) or not match["value"]:
        return
    readings = ((kind, read) for kind in _KINDS if (read := canonical(kind, match["value"])) is not None)
    kind, value = next(readings, ("text", match["value"].strip()))
    yield Fact(path, about, labels, kind, value, start, end, start + first, start + last)
