"""What a theme is: the kinds of notes of a world, their facts and relations, and how its notes are worded.

A fact is declared in one line, `label | type and values | other labels | sentence`:

- values: `number 2-60 kg`, `money 20-400 EUR`, `date 2019-2024`, `phone`, `email`, `enum calm/nervous`, `list a/b/c`,
  `text PATTERN` with a pattern of `naming.fill`;
- the sentence states it in prose, with `{name}` and `{value}`; in `user.md` without `{name}`.

A relation is declared as `label/plural | source>target | one or many | inverse/plural | sentence`; `one`: a note has at
most one of it.
"""

import re
from dataclasses import dataclass
from functools import cache, cached_property

from posttrain_memory.worlds.values import TYPES

_VERBAL = re.compile(r"\b(?:\w+ed|sown|dug|born|since|until|ends|opens|starts|due|expires|kept|built)$")


@dataclass(frozen=True)
class Attribute:
    """A fact that notes of a kind may have. `values` is the text after the type, without the unit."""

    key: str
    label: str
    type: str
    values: str
    unit: str
    aliases: tuple[str, ...]
    sentence: str

    @property
    def noun(self) -> str:
        """What to call the fact in a question: the label, or the first alias of a label that is no noun."""
        return self.aliases[0] if _VERBAL.search(self.label) else self.label

    @property
    def be(self) -> str:
        """Is or are, after the noun."""
        return "are" if re.search(r"[^su]s$", self.noun) else "is"


@dataclass(frozen=True)
class Relation:
    """Notes of the type `source` name notes of the type `target` under `label`, these the former under `inverse`."""

    key: str
    label: str
    plural: str
    source: str
    target: str
    many: bool
    inverse: str
    inverse_plural: str
    sentence: str

    @property
    def inverse_key(self) -> str:
        return f"{self.key}~"


@dataclass(frozen=True)
class Kind:
    """A kind of notes: `about` is person, place, organisation, thing or event; `names` are patterns."""

    key: str
    about: str
    folder: str
    noun: str
    plural: str
    names: tuple[str, ...]
    intro: tuple[str, ...]
    facts: tuple[str, ...]

    @cached_property
    def attributes(self) -> tuple[Attribute, ...]:
        return tuple(attribute(text) for text in self.facts)


@dataclass(frozen=True)
class Theme:
    """A subject of a world, with the words of its notes.

    `user` are the facts of `user.md`; the source `user` of a relation is that note. Labels and aliases are unique in a
    theme, and one key has one type, so a line of any note can be read without knowing its kind.
    """

    name: str
    titles: tuple[str, ...]
    styles: tuple[str, ...]
    intro: tuple[str, ...]
    headings: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    """Headings of facts, of relations, and of the rest."""
    user: tuple[str, ...]
    kinds: tuple[Kind, ...]
    links: tuple[str, ...]
    filler: tuple[str, ...]

    @cached_property
    def relations(self) -> tuple[Relation, ...]:
        return tuple(relation(text) for text in self.links)

    @cached_property
    def user_attributes(self) -> tuple[Attribute, ...]:
        return tuple(attribute(text) for text in self.user)

    @cached_property
    def attributes(self) -> dict[str, Attribute]:
        """Key -> attribute, of all kinds."""
        found = {item.key: item for item in self.user_attributes}
        for kind in self.kinds:
            found |= {item.key: item for item in kind.attributes}
        return found

    @cached_property
    def labels(self) -> dict[str, str]:
        """Plain label or alias -> key of the attribute, or of the relation, with `~` behind where it is the inverse."""
        found: dict[str, str] = {}
        for item in self.attributes.values():
            found |= {plain_label(text): item.key for text in (item.label, *item.aliases)}
        for tie in self.relations:
            found |= {plain_label(text): tie.key for text in (tie.label, tie.plural)}
            found |= {plain_label(text): tie.inverse_key for text in (tie.inverse, tie.inverse_plural)}
        return found

    def declared(self, key: str) -> list[Attribute]:
        """The attributes of a key, which kinds may declare with different values."""
        items = [*self.user_attributes, *(item for kind in self.kinds for item in kind.attributes)]
        return [item for item in items if item.key == key]

    def kind(self, key: str) -> Kind:
        """The kind of notes of this key."""
        return next(kind for kind in self.kinds if kind.key == key)

    def of(self, kind: str) -> tuple[Attribute, ...]:
        """The attributes of a kind of notes, or of `user`."""
        return self.user_attributes if kind == "user" else self.kind(kind).attributes

    def relation(self, key: str) -> Relation:
        """The relation of a key, with or without the `~` of its inverse."""
        return next(item for item in self.relations if item.key == key.removesuffix("~"))


def plain_label(text: str) -> str:
    """A label to compare by: lower case, single spaces, no underscores."""
    return " ".join(text.casefold().replace("_", " ").split())


@cache
def attribute(text: str) -> Attribute:
    """The attribute that a line declares; ValueError names a line that is none."""
    label, values, aliases, sentence = (part.strip() for part in text.split("|"))
    kind, _, rest = values.partition(" ")
    unit = ""
    if kind == "number":
        match = re.fullmatch(r"(\d+-\d+)(?: (.+))?", rest)
        if match is None:
            raise ValueError(f"no range of numbers in {text!r}")
        rest, unit = match.group(1), match.group(2) or ""
    if kind not in TYPES or "{value}" not in sentence or not sentence.endswith("."):
        raise ValueError(f"no attribute: {text!r}")
    others = tuple(other.strip() for other in aliases.split(",") if other.strip())
    return Attribute(label.replace(" ", "_"), label, kind, rest, unit, others, sentence)


@cache
def relation(text: str) -> Relation:
    """The relation that a line declares."""
    labels, ends, number, inverses, sentence = (part.strip() for part in text.split("|"))
    label, plural = labels.split("/")
    inverse, inverse_plural = inverses.split("/")
    source, target = ends.split(">")
    if number not in ("one", "many") or "{value}" not in sentence:
        raise ValueError(f"no relation: {text!r}")
    key = f"{source}>{label.replace(' ', '_')}"
    return Relation(key, label, plural, source, target, number == "many", inverse, inverse_plural, sentence)


def _all() -> dict[str, Theme]:
    from posttrain_memory.worlds import (
        themes_care,
        themes_home,
        themes_outdoors,
        themes_stage,
        themes_work,
    )

    return {
        theme.name: theme
        for part in (themes_home, themes_care, themes_outdoors, themes_work, themes_stage)
        for theme in part.ALL
    }


THEMES: dict[str, Theme] = _all()
"""Name -> theme."""
FOREIGN = Theme("foreign", (), (), (), ((), (), ()), (), (), (), ())
"""The theme of a vault that was not made here: no label is known, so nothing in it is a statement."""


def theme_named(name: str) -> Theme:
    """The theme of a name, `FOREIGN` for `foreign`."""
    return FOREIGN if name == FOREIGN.name else THEMES[name]
