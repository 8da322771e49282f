"""Themes: the subject of a generated world, with the kinds of its notes, their facts and relations, and their wording.

Each theme is a file `themes/NAME.yaml` with the keys of `Theme`.
"""

import json
import re
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field

from posttrain.recipe.base import BaseConfig

Style = Literal["bullets", "bold", "plain", "table", "front", "prose"]
"""How the facts of a note are laid out; `front` is YAML front matter."""
FOLDER = Path(__file__).with_name("themes")
_NEEDS_ALIAS = re.compile(r"\b(?:\w+ed|sown|dug|born|since|until|ends|opens|starts|due|expires|kept|built)$")
"""Labels that are verb phrases and cannot stand after "the"."""


Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(min_length=1)]
Sentence = Annotated[str, Field(pattern=r"\{value\}.*\.$")]


class Attribute(BaseConfig):
    """A fact that notes of a kind may state."""

    label: Text
    """The name of the fact, as written in notes."""
    type: Literal["text", "number", "money", "date", "phone", "email", "enum", "list"]
    """The type of its values."""
    values: str = ""
    """The range or choices of its values: `2-60` (number), `20-400 EUR` (money), `2019-2024` (date: years), `calm/nervous`
    (enum), `a/b/c` (list), a pattern of `naming.fill` (text). Empty for phone and email."""
    unit: str = ""
    """Unit of a number."""
    aliases: tuple[Text, ...] = ()
    """Other labels of the same fact."""
    sentence: Sentence
    """States the fact in prose, with `{name}` (the note; not in facts about the user) and `{value}`."""

    def _check(self) -> None:
        form = {
            "number": r"\d+-\d+",
            "money": r"\d+-\d+ [A-Z]{3}",
            "date": r"\d{4}-\d{4}",
            "phone": "",
            "email": "",
            "enum": r"[^/]+(/[^/]+)+",
            "list": r"[^/]+(/[^/]+)+",
            "text": r".+",
        }[self.type]
        if not re.fullmatch(form, self.values):
            raise ValueError(f"`values` of type {self.type} has the wrong form: {self.values!r}")
        if self.unit and self.type != "number":
            raise ValueError("`unit` belongs to type number only")

    @cached_property
    def key(self) -> str:
        """The identifier of the fact in truths and rewards."""
        return self.label.replace(" ", "_")

    @cached_property
    def noun(self) -> str:
        """The name of the fact in a question: the label, or the first alias if the label is a verb phrase."""
        return self.aliases[0] if _NEEDS_ALIAS.search(self.label) else self.label

    @cached_property
    def be(self) -> str:
        """`is` or `are`, to agree with `noun`."""
        return "are" if re.search(r"[^su]s$", self.noun) else "is"


class Relation(BaseConfig):
    """Notes of kind `source` link to notes of kind `target` under `label`, and those link back under `inverse`."""

    label: Text
    plural: Text
    source: Text
    """Key of a kind, or `user` for `user.md`."""
    target: Text
    """Key of a kind."""
    many: bool
    """Whether one note may have several targets."""
    inverse: Text
    inverse_plural: Text
    sentence: Sentence
    """States the relation in prose, with `{name}` (not where `source` is `user`) and `{value}`."""

    @cached_property
    def key(self) -> str:
        """The identifier of the relation in truths and rewards."""
        return f"{self.source}>{self.label.replace(' ', '_')}"


class Kind(BaseConfig):
    """A kind of notes."""

    key: Text
    about: Literal["person", "place", "organisation", "thing", "event"]
    folder: Text
    """Folder of these notes under `entities/`."""
    noun: Text
    plural: Text
    names: Texts
    """Patterns of names, see `naming.fill`."""
    intro: Texts
    """Opening sentences with `{name}`."""
    facts: Annotated[tuple[Attribute, ...], Field(min_length=1)]


class Headings(BaseConfig):
    """Alternatives for the headings of a note's sections."""

    facts: Texts
    relations: Texts
    other: Texts


class Theme(BaseConfig):
    """The subject of a world and the wording of its notes.

    Labels and aliases are unique within a theme, and a key has one type, so any line can be read without the kind of its
    note.
    """

    name: Text
    titles: Texts
    """Patterns of the world's title."""
    styles: Annotated[tuple[Style, ...], Field(min_length=1)]
    """Ways in which notes state facts."""
    intro: Texts
    """Opening sentences of `user.md`."""
    headings: Headings
    user_facts: Annotated[tuple[Attribute, ...], Field(min_length=1)]
    """Facts of `user.md`."""
    kinds: Annotated[tuple[Kind, ...], Field(min_length=1)]
    relations: Annotated[tuple[Relation, ...], Field(min_length=1)]
    filler: Texts
    """Patterns of sentences that state no fact."""

    def _check(self) -> None:
        kinds = {kind.key for kind in self.kinds}
        if "user" in kinds or len(kinds) < len(self.kinds):
            raise ValueError("kinds: each needs its own `key`, other than user")
        for number, tie in enumerate(self.relations):
            if tie.source not in {*kinds, "user"} or tie.target not in kinds:
                raise ValueError(f"relations.{number}: `source` and `target` are keys of `kinds` ({tie.key})")
        types: dict[str, str] = {}
        owners: dict[str, str] = {}
        for item in self.all_facts:
            if types.setdefault(item.key, item.type) != item.type:
                raise ValueError(f"the fact {item.label!r} has the types {types[item.key]} and {item.type}")
            for text in (item.label, *item.aliases):
                if owners.setdefault(plain_label(text), item.key) != item.key:
                    raise ValueError(f"the label {text!r} names both {owners[plain_label(text)]} and {item.key}")
        for tie in self.relations:
            forward, inverse = (tie.label, tie.plural), (tie.inverse, tie.inverse_plural)
            for text, key in (*((text, tie.key) for text in forward), *((text, f"{tie.key}~") for text in inverse)):
                if owners.setdefault(plain_label(text), key) != key:
                    raise ValueError(f"the label {text!r} names both {owners[plain_label(text)]} and {key}")

    @cached_property
    def all_facts(self) -> list[Attribute]:
        """The attributes of the user and of all kinds. Kinds may declare a key with different values."""
        return [*self.user_facts, *(item for kind in self.kinds for item in kind.facts)]

    @cached_property
    def attributes(self) -> dict[str, Attribute]:
        """Key -> attribute, over all kinds."""
        return {item.key: item for item in self.all_facts}

    @cached_property
    def labels(self) -> dict[str, str]:
        """Plain label or alias -> key of the attribute or relation; the key of an inverse ends with `~`."""
        keys: dict[str, str] = {}
        for item in self.attributes.values():
            keys |= {plain_label(text): item.key for text in (item.label, *item.aliases)}
        for tie in self.relations:
            keys |= {plain_label(text): tie.key for text in (tie.label, tie.plural)}
            keys |= {plain_label(text): f"{tie.key}~" for text in (tie.inverse, tie.inverse_plural)}
        return keys

    def declared(self, key: str) -> list[Attribute]:
        """The attributes of a key; kinds may declare it with different values."""
        return [item for item in self.all_facts if item.key == key]

    def kind(self, key: str) -> Kind:
        """The kind of notes with this key."""
        return next(kind for kind in self.kinds if kind.key == key)

    def of(self, kind: str) -> tuple[Attribute, ...]:
        """The attributes of a kind of notes, or of `user`."""
        return self.user_facts if kind == "user" else self.kind(kind).facts

    def relation(self, key: str) -> Relation:
        """The relation of a key, with or without the `~` of its inverse."""
        return next(item for item in self.relations if item.key == key.removesuffix("~"))


def plain_label(text: str) -> str:
    """A label in the form used for comparison: lower case, single spaces, no underscores."""
    return " ".join(text.casefold().replace("_", " ").split())


def read_theme(text: str) -> Theme:
    """The theme of a YAML document. Raises ValidationError for a key that is missing, unknown or wrong."""
    # The C loader is ten times as fast, but not part of every build of PyYAML.
    return Theme.model_validate_json(
        json.dumps(yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))), strict=True
    )


@cache
def themes() -> dict[str, Theme]:
    """Name -> theme, of all files in `themes/`."""
    read = (read_theme(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.yaml")))
    return {theme.name: theme for theme in read}


FOREIGN = Theme.model_construct(
    name="foreign",
    titles=(),
    styles=(),
    intro=(),
    headings=Headings.model_construct(facts=(), relations=(), other=()),
    user_facts=(),
    kinds=(),
    relations=(),
    filler=(),
)
"""The theme of a vault that was not generated here: it has no labels, so no line is read as a statement."""


def theme_named(name: str) -> Theme:
    """The theme called `name`; `FOREIGN` for `foreign`."""
    return FOREIGN if name == FOREIGN.name else themes()[name]
