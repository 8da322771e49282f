"""Privacy rules: what may be seen of a vault, by note, label, category and value.

A set of rules is a YAML document with lists of things to `hide`, or that alone may be shown (`only`):

    hide:
      - category: phone
      - {note: Ada Stone, label: salary}
      - note: entities/health/*
      - value: Project Falcon
    to: mcp

A document that does not fit this schema hides everything.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, get_args

import yaml
from pydantic import Field, ValidationError, field_validator

from posttrain.errors import InputError
from posttrain.recipe.base import BaseConfig

Category = Literal["phone", "email", "date", "money", "number"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
FILE = "privacy.yaml"
"""The file in the folder of a vault with its own rules. Only notes are open to the agent, so it cannot read or change it."""
_LONGEST = 20_000
"""Maximum number of characters of a set of rules."""

_BRACKETS = 1000
"""Maximum number of brackets, because the time to parse them grows with their square."""


class Rule(BaseConfig):
    """What has all of these properties."""

    note: str | None = Field(None, min_length=1)
    """The path, file name or title of a note, or a pattern of paths with `*`. null: every note."""
    label: str | None = Field(None, min_length=1)
    """The label of a fact, the heading of a section, or the head of a column."""
    category: Category | None = None
    """A kind of value that is recognized by its form."""
    value: str | None = Field(None, min_length=2)
    """An exact value, in any case and with any separators."""

    def _check(self) -> None:
        if not self.model_fields_set:
            raise ValueError("a rule needs `note`, `label`, `category` or `value`; all notes are `note: '*'`")


class RuleSet(BaseConfig):
    """What is hidden, and what alone is shown. Sets of rules add up: what one hides, no other shows."""

    hide: tuple[Rule, ...] = ()
    """What must not be shown."""
    only: tuple[Rule, ...] = ()
    """What may be shown, besides titles and links; everything else is hidden."""
    to: Literal["chat", "mcp"] | None = None
    """Whom the rules are for: the chat on a terminal, or programs over MCP. null: everyone."""

    @field_validator("only")
    @classmethod
    def _check_only(cls, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        if any(rule.value is not None for rule in rules):
            raise ValueError("a rule of `only` has no `value`; name the note, label or category")
        return rules

    def _check(self) -> None:
        if not self.hide and not self.only:
            raise ValueError("set `hide` or `only`")


@dataclass(frozen=True)
class NotUnderstood:
    """A text that is not a set of rules, and the reason."""

    sentence: str
    reason: str


@dataclass(frozen=True)
class Selected:
    """A rule with the paths of its notes in one vault; `notes` is None for every note."""

    rule: Rule
    notes: frozenset[str] | None

    def concerns(self, *paths: str) -> bool:
        """Whether the rule covers any of these notes."""
        return self.notes is None or not self.notes.isdisjoint(paths)

    @property
    def whole(self) -> bool:
        """Whether the rule covers everything in its notes."""
        return self.rule.label is None and self.rule.category is None and self.rule.value is None


def parse_rules(text: str) -> RuleSet | NotUnderstood:
    """The rules of a YAML document. Every scalar is read as text."""
    sentence = " ".join(text.split())[:120]
    if len(text) > _LONGEST or text.count("[") + text.count("{") > _BRACKETS:
        return NotUnderstood(sentence, f"it has more than {_LONGEST} characters or {_BRACKETS} brackets")
    try:
        return RuleSet.model_validate(yaml.load(text, yaml.BaseLoader))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        return NotUnderstood(sentence, f"{f'{key}: ' if key else ''}{first['msg'].removeprefix('Value error, ')}")
    except (yaml.YAMLError, ValueError, RecursionError):
        return NotUnderstood(sentence, "it is not a YAML document with the keys `hide` and `only`")


def select(rule: Rule, names: Mapping[str, str], paths: Mapping[str, object]) -> Selected | None:
    """`rule` with the notes that it names; None if there are none. `names`: lower-case name of a note -> path."""
    if rule.note is None:
        return Selected(rule, None)
    if "*" in rule.note:
        return Selected(rule, frozenset(path for path in paths if fnmatchcase(path, rule.note)))
    path = rule.note if rule.note in paths else names.get(" ".join(rule.note.casefold().replace("_", " ").split()))
    return None if path is None else Selected(rule, frozenset([path]))


def vault_rules(root: Path, to: Literal["chat", "mcp"]) -> list[str]:
    """The rules in `privacy.yaml` of a vault that hold for `to`: one document, or several separated by `---`.

    Raises InputError if the file cannot be read or is not understood.
    """
    file = root / FILE
    try:
        texts = file.read_text(encoding="utf-8").split("\n---\n") if file.exists() or file.is_symlink() else []
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read, so the privacy rules cannot be kept: {error}") from None
    rules = []
    for text in texts:
        parsed = parse_rules(text)
        if isinstance(parsed, NotUnderstood):
            raise InputError(f"{file}: {parsed.reason}")
        rules += [text] if parsed.to in (None, to) else []
    return rules
