"""One program of another framework: its flags, its defaults, and how they are converted to a recipe."""

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from posttrain.errors import InputError
from posttrain.recipe.validation import nearest_type
from posttrain_import.rows import HIDDEN, SET, Answer, Flags, Row, Rule


@dataclass(frozen=True)
class Program:
    """`stage`: the stage of the recipe. `rules`: the conversion of each flag.

    `defaults`: default values of flags that affect the result. `implied`: rows for behavior of the framework that no
    flag changes. `other_names`: names of the same flags in other versions. `rows_of`: the flag with the training data.
    """

    framework: str
    stage: str
    rules: Mapping[str, Rule]
    defaults: Mapping[str, str] = field(default_factory=dict)
    implied: Callable[[Flags], Iterable[Row]] = lambda _: ()
    other_names: Mapping[str, str] = field(default_factory=dict)
    rows_of: str = ""
    limit: str = ""
    """Flag that limits the number of training rows."""
    prefix: str = "--"
    negation: bool = False
    """`--no_FLAG` turns off a switch, as with the parser of transformers."""

    scripts: tuple[str, ...] = ()
    """Names of the files that run it."""
    arguments: tuple[tuple[int, str], ...] = ()
    """Place of an argument and its value, where the arguments of a script choose the program."""
    positions: tuple[str, ...] = ()
    """Names of positional arguments."""
    command: str = ""
    """The command of this package that replaces a script; its options are keys of the rules."""
    files: tuple[str, ...] = ()
    """The recipes of this package that the arguments of a script change."""

    def positional(self, words: list[str]) -> list[tuple[str, str]]:
        """Positional words with their names."""
        if len(words) > len(self.positions):
            raise InputError(
                f"the script has {len(self.positions)} arguments, and the command {len(words)}; remove the others"
            )
        return list(zip(self.positions, words, strict=False))

    def replacement(self, rows: Iterable[Row]) -> str:
        """The command with the options (`--workers`), arguments (`FILE`) and recipe keys of the rows."""
        values = {key: value for row in rows for key, value in row.answer.keys.items()}
        words = [self.command, *(shlex.quote(str(value)) for key, value in values.items() if key.isupper())]
        for key, value in values.items():
            text = value if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
            if key.startswith("--"):
                words += [key, shlex.quote(text)] if text else [key]
            elif not key.isupper():
                words.append(shlex.quote(f"{key}={text}"))
        return " ".join(words)

    def name_of(self, flag: str) -> str:
        """The name of a flag in `rules`; flags of the command line may have `-` for `_`."""
        if flag in self.rules or flag in self.other_names:
            return self.other_names.get(flag, flag)
        plain = flag.replace("-", "_") if self.prefix else flag
        return self.other_names.get(plain, plain)

    def is_secret(self, flag: str, value: str) -> bool:
        """Whether the value of a flag must not be shown."""
        rule = self.rules.get(self.name_of(flag))
        return rule is not None and rule.secret and value.lower() not in ("", SET, "true", "false")

    def table(self, words: list[tuple[str, str]], rows: int | None) -> list[Row]:
        """A row for each flag, for each default that has an effect, and for behavior that no flag changes."""
        given, written, shown = {}, {}, {}
        for flag, value in words:
            name, turned = self._switched(self.name_of(flag))
            given[name], written[name], shown[name] = turned or value or SET, flag, value or SET
        flags = Flags(given, self.defaults, rows)
        repeated = {
            name for name in given if sum(self._switched(self.name_of(flag))[0] == name for flag, _ in words) > 1
        }
        found: list[Row] = []
        taken: set[str] = set()
        for name, value in given.items():
            rule = self.rules.get(name)
            answer = self._unknown(name) if rule is None else self._answer(name, value, flags)
            if name in repeated:
                note = "; ".join(part for part in (answer.note, "given twice; the last one is used") if part)
                answer = Answer(answer.outcome, answer.keys, note)
            taken |= set(answer.keys)
            value = HIDDEN if self.is_secret(name, value) else shown[name]
            found.append(Row(f"{self.prefix}{written[name]}", value, answer))
        for name, value in self.defaults.items():
            if name not in given:
                answer = self._answer(name, value, flags)
                if answer.keys and not set(answer.keys) & taken:
                    taken |= set(answer.keys)
                    found.append(Row(f"{self.prefix}{name}", value, answer, True))
                elif answer.outcome == "not supported":
                    found.append(Row(f"{self.prefix}{name}", value, answer, True))
        for row in self.implied(flags):
            if not set(row.answer.keys) & taken:
                taken |= set(row.answer.keys)
                found.append(row)
        return found

    def _switched(self, name: str) -> tuple[str, str]:
        """For `no_NAME`, the switch and `false`; other flags unchanged."""
        plain = self.name_of(name.removeprefix("no_"))
        rule = self.rules.get(plain)
        if self.negation and name not in self.rules and name != plain and rule is not None and rule.switch:
            return plain, "false"
        return name, ""

    def _answer(self, name: str, value: str, flags: Flags) -> Answer:
        try:
            return self.rules[name].apply(value, flags)
        except (ArithmeticError, LookupError, TypeError, ValueError, TemplateError) as error:
            why = f"{type(error).__name__}: {str(error)[:100]}"
            raise InputError(
                f"{self.prefix}{name} {value[:100]!r} cannot be converted ({why}); correct it, or the flags that it depends on"
            ) from error

    def _unknown(self, name: str) -> Answer:
        near = nearest_type(name, [*self.rules, *self.other_names])
        return Answer("unknown", {}, f"{self.framework} has no such flag, or the importer does not support it{near}")


def values_of(rows: Iterable[Row]) -> dict[str, Any]:
    """Dotted keys of the recipe with their values. Raises InputError if two flags set a key to different values."""
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for row in rows:
        for key, value in row.answer.keys.items():
            if key in values and values[key] != value and not isinstance(value, list):
                raise InputError(
                    f"{origin[key]} sets {key} to {values[key]} and {row.flag} to {value}; remove one of the flags"
                )
            if key in values and isinstance(value, list) and isinstance(values[key], list):
                value = [*values[key], *(item for item in value if item not in values[key])]
            values[key], origin[key] = value, row.flag
    return values


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as sections."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        *sections, last = key.split(".")
        inside = found
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[last] = value
    return found
