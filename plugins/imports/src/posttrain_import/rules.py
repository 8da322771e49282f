"""Rules in YAML, `rules/*.yaml`: what each flag of a program becomes.

A file has `programs`, `parts` that programs share, and `commands`, which find the program that a command runs. In `rules`,
a flag has

- a key, or `{key: KEY, note: SENTENCE}`: the same value. `KEY as UNIT` converts it, see `_UNITS`;
- `{set: {KEY: VALUE}, note: SENTENCE}`: keys that are computed. `{{ EXPRESSION }}` in a value or sentence is evaluated by
  Jinja; its names are those of `Flags`, and `names` of the program;
- `{choice: {VALUE: OURS}, key: KEY}`: a table of values; `{switch: {KEY: VALUE}}`: a flag without a value;
- `{no effect: WHY}`, `{error: SENTENCE}`, `{remedy: REMEDY, require: [KEY]}`, which leaves the keys to the user, or
  `{not supported: REMEDY, off: [VALUE]}`, which has no effect at `false` and the like, and at the values `off`;
- a list of such cases with `if: EXPRESSION`; the first that holds counts. `before` of a case is a command to run first.

`no effect` and `not supported` of a program list the flags of each sentence. `switches`, `several` and `secret` name flags
without a value, with several words, and with a value that is not shown. `implied` has rows for behavior that no flag changes.
`writes` has expressions for the folders that a program saves its model to, each with the run that replaces it (`run`: its
own), and `reads` the folder behind a key whose path is not an argument.
"""

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from math import ceil
from pathlib import Path
from typing import Any

import yaml
from jinja2 import TemplateError, Undefined
from jinja2.runtime import Context, missing
from jinja2.sandbox import SandboxedEnvironment

from posttrain.errors import InputError
from posttrain.recipe.sources import REQUIRED
from posttrain.recipe.validation import nearest_type
from posttrain_import.rows import SET, Answer, Row, data_path, literal, run_name

_UNITS: dict[str, Callable[[str], Any]] = {
    "": literal,
    "text": str,
    "data": data_path,
    "words": lambda text: text if text == "all-linear" else text.split(),
    "numbers": lambda text: [literal(word) for word in text.split()],
}
"""`KEY as UNIT` -> the value of the key."""
_OFF = ("false", "none", "null", "", "0", "0.0")
"""Values at which a flag without a counterpart is off."""
_EXPRESSION = re.compile(r"\{\{((?:(?!\}\}).)*)\}\}")


class _Environment(SandboxedEnvironment):
    class context_class(Context):
        """Names that the environment does not have are those of the flags; an unknown one is a LookupError."""

        def resolve_or_missing(self, key: str) -> Any:
            value = super().resolve_or_missing(key)
            return self.parent["flags"][key] if value is missing else value


_environment = _Environment()
_environment.globals |= {
    "folder": lambda path: str(Path(path).with_suffix("")),
    "as_list": lambda value: value if isinstance(value, list) else [value],
    "ceiling": lambda number: ceil(round(number, 9)),  # rounding errors of a product do not count
    "float": float,
    "int": int,
    "literal": literal,
    "max": max,
    "min": min,
    "no_rows": "the number of training rows is not known; import again with `--rows N`, or set {} yourself".format,
    "numbers": _UNITS["numbers"],
    "paths": data_path,
    "run_name": run_name,
    "short": "{:g}".format,
    "weighted": lambda names, weights: [{"function": names[i], "weight": one} for i, one in enumerate(weights)],
    "warmup_note": lambda updates, ratio: f"{updates:g} updates x {ratio:g} = {updates * ratio:.4g}, rounded up",
}
_environment.filters["sub"] = lambda text, pattern, by: re.sub(pattern, by, text)
_environment.tests["fully"] = lambda text, pattern: re.fullmatch(pattern, text) is not None
_compiled = cache(lambda expression: _environment.compile_expression(expression, undefined_to_none=False))
_template = cache(lambda text: _environment.from_string(text).render)


@dataclass(frozen=True)
class Program:
    """One program of another framework: its flags, its defaults, and how they are converted to a recipe of `stage`.

    `rules`: the cases of each flag. `defaults`: default values of flags that affect the result. `implied`: rows for
    behavior of the framework that no flag changes. `other_names`: names of the same flags in other versions. `rows_of`:
    the flag with the training data; `limit`: the flag that limits its number of rows. `negation`: `--no_FLAG` turns off
    a switch, as with the parser of transformers. `config`: the flag with a YAML file of flags. `otherwise`: why other
    flags have no effect. `positions`: names of positional arguments. `files`: the recipes of this package that the
    arguments of a script change. `command`: the command of this package that replaces a script; its options (`--workers`)
    and arguments (`FILE`) are keys of the rules.
    """

    framework: str
    stage: str = ""
    rules: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    implied: tuple[Mapping[str, Any], ...] = ()
    other_names: Mapping[str, str] = field(default_factory=dict)
    rows_of: str = ""
    limit: str = ""
    prefix: str = "--"
    negation: bool = False
    config: str = ""
    otherwise: str = ""
    positions: tuple[str, ...] = ()
    command: str = ""
    files: tuple[str, ...] = ()
    writes: Mapping[str, str] = field(default_factory=dict)
    reads: Mapping[str, str] = field(default_factory=dict)
    switches: frozenset[str] = frozenset()
    several: frozenset[str] = frozenset()
    secret: frozenset[str] = frozenset()

    def name_of(self, flag: str) -> str:
        """The name of a flag in `rules`; flags of the command line may have `-` for `_`."""
        if flag not in self.rules and flag not in self.other_names and self.prefix:
            flag = flag.replace("-", "_")
        return self.other_names.get(flag, flag)

    def is_secret(self, flag: str, value: str) -> bool:
        """Whether the value of a flag must not be shown."""
        hidden = any(re.fullmatch(pattern, self.name_of(flag)) for pattern in self.secret)
        return hidden and value.lower() not in ("", SET, "true", "false")

    def table(self, words: Sequence[tuple[str, str | None]], rows: int | None = None) -> list[Row]:
        """A row for each flag, for each default that has an effect, and for behavior that no flag changes. The value of a
        flag without one is None."""
        given: dict[str, str] = {}
        shown: dict[str, tuple[str, str]] = {}
        times: Counter[str] = Counter()
        for flag, value in words:
            name = self.name_of(flag)
            switch = self.name_of(name.removeprefix("no_"))
            turned_off = self.negation and name not in self.rules and name != switch and switch in self.switches
            name = switch if turned_off else name
            value = SET if value is None else value
            given[name] = "false" if turned_off else value
            label = flag if flag.isupper() else f"{self.prefix}{flag}"  # a variable of the shell
            shown[name] = label, "..." if self.is_secret(name, value) else value
            times[name] += 1
        flags = Flags(self, given, rows)
        table: list[Row] = []
        taken: set[str] = set()
        for name, value in given.items():
            answer = self._answer(name, replace(flags, value=value))
            if times[name] > 1:
                note = "; ".join(part for part in (answer.note, "given twice; the last one is used") if part)
                answer = replace(answer, note=note)
            taken |= answer.keys.keys()
            table.append(Row(*shown[name], answer))
        implied = [
            Row(f"{self.prefix}{name}", value, self._answer(name, replace(flags, value=value)), True)
            for name, value in self.defaults.items()
            if name not in given
        ]
        implied = [row for row in implied if row.answer.keys or row.answer.outcome == "not supported"]
        for case in self.implied:
            if "if" not in case or flags.evaluate(case["if"]):
                answer = flags.answer(case)
                if answer.keys or answer.outcome == "not supported" or "no effect" in case:
                    implied.append(Row(case["row"], flags.note(case["value"]), answer, True))
        for row in implied:
            if not taken & row.answer.keys.keys():
                taken |= row.answer.keys.keys()
                table.append(row)
        return table

    def _answer(self, name: str, flags: "Flags") -> Answer:
        if name not in self.rules:
            if self.otherwise:
                return Answer("no effect", {}, self.otherwise)
            near = nearest_type(name, [*self.rules, *self.other_names])
            return Answer(
                "unknown", {}, f"{self.framework} has no such flag, or the importer does not support it{near}"
            )
        try:
            for case in self.rules[name]:
                if "if" not in case or flags.evaluate(case["if"]):
                    return flags.answer(case)
            raise LookupError("no rule for this value")
        except (ArithmeticError, LookupError, TypeError, ValueError, TemplateError) as error:
            why = f"{type(error).__name__}: {str(error)[:100]}"
            raise InputError(
                f"{self.prefix}{name} {flags.value[:100]!r} cannot be converted ({why}); correct it, or the flags that it depends on"
            ) from error


@dataclass(frozen=True)
class Flags:
    """The flags of a command with their values as text, which the names of an expression stand for. `value` and `typed`
    are the value of the rule's flag; `rows` is the number of training rows or prompts, None if it is not known.
    """

    program: Program
    values: Mapping[str, str]
    rows: int | None = None
    value: str = ""

    def __getitem__(self, name: str) -> Any:
        if name in self.program.names:
            return self.evaluate(self.program.names[name])
        if name == "typed":
            return literal(self.value)
        if name in ("value", "rows", "given", "text", "on", "number", "whole"):
            return getattr(self, name)
        raise LookupError(f"{name} is not defined")

    def given(self, name: str) -> bool:
        return name in self.values

    def text(self, name: str, default: str = "") -> str:
        return self.values.get(name, self.program.defaults.get(name, default))

    def on(self, name: str) -> bool:
        """Whether a switch is set."""
        return self.text(name, "false").lower() not in ("false", "none", "null", "", "0", "no")

    def number(self, name: str, default: float | None = None) -> float:
        """The value as a number. Raises InputError if it is not a number."""
        text = self.text(name, "null")
        value = default if text.lower() in ("null", "none") and default is not None else literal(text)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise InputError(f"{name} is {'missing' if text in ('', 'null') else text}; it must be a number")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value):
            raise InputError(f"{name} is {value}; it must be a whole number")
        return int(value)

    def evaluate(self, expression: str) -> Any:
        return _compiled(expression)(flags=self)

    def fill(self, template: Any) -> Any:
        """A value of a rule: `{{ EXPRESSION }}` is its value, a text with expressions is a text, others are literals."""
        if isinstance(template, list):
            return [self.fill(one) for one in template]
        if match := _EXPRESSION.fullmatch(template):
            return self.evaluate(match[1])
        return self.note(template) if "{{" in template else literal(template)

    def note(self, template: str) -> str:
        return _template(template)(flags=self) if "{{" in template else template

    def keys(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Keys with their values; without those whose `if` has no `else` and is false."""
        filled = {key: self.fill(value) for key, value in values.items()}
        return {key: value for key, value in filled.items() if not isinstance(value, Undefined)}

    def answer(self, case: Mapping[str, Any]) -> Answer:
        """The result of one case of a rule."""
        if "error" in case:
            raise InputError(self.note(case["error"]))
        value, note, keys = self.value, self.note(case.get("note", "")), self.keys(case.get("set", {}))
        if "no effect" in case:
            return Answer("no effect", {}, self.note(case["no effect"]))
        if "not supported" in case:
            if value.lower() in (*_OFF, *case.get("off", ())):
                return Answer("no effect", {}, "off, as here")
            return Answer("not supported", {}, self.note(case["not supported"]))
        if "remedy" in case:
            note = self.note(case["remedy"])
            required = dict.fromkeys(case.get("require", ()), f"{REQUIRED} {note}")
            return Answer("not supported", keys | required, note)
        if "switch" in case:
            ((key, setting),) = self.keys(case["switch"]).items()
            if value.lower() not in (*_OFF, "no"):
                return Answer("equal", {key: setting}, note)
            if isinstance(setting, bool):
                return Answer("equal", {key: not setting}, note)
            return Answer("no effect", {}, "off, as here without the key")
        if "choice" in case:
            return self._chosen(case, note)
        if "run" in case:
            name = run_name(value, case["run"])
            return Answer("converted", {"name": name}, f"the model is in `runs/{name}/model`")
        if "key" in case:
            names, _, unit = case["key"].partition(" as ")
            converted = _UNITS[unit](value)
            outcome = "converted" if unit == "data" and converted != value else "equal"
            return Answer(outcome, dict.fromkeys(names.split(", "), converted), note)
        outcome = self.note(case.get("outcome", "converted" if keys else "no effect"))
        return Answer(outcome, keys, note, case.get("before", ""))

    def _chosen(self, case: Mapping[str, Any], note: str) -> Answer:
        """A value that is translated by a table. If the translation is a mapping, its keys are set instead of `key`."""
        text, choices, key = str(self.fill(case.get("of", "{{ value }}"))), case["choice"], case.get("key", "")
        if text not in choices:
            remedy = f"the importer supports {', '.join(choices)}; see `posttrain recipe {key}`"
            kept = {name: case[name] for name in ("set", "require") if name in case}
            return self.answer({**kept, "remedy": case.get("else", remedy)})
        value = choices[text]
        keys = self.keys(value) if isinstance(value, dict) else {key: value}
        if not keys:
            return Answer("no effect", {}, note or "as here")
        return Answer(self.note(case.get("outcome", "equal" if keys == {key: text} else "converted")), keys, note)


def read_file(file: Traversable) -> dict[str, Any]:
    """A YAML file in which every value is text."""
    return yaml.load(file.read_text(encoding="utf-8"), getattr(yaml, "CBaseLoader", yaml.BaseLoader))


@cache
def read_files() -> list[dict[str, Any]]:
    """The files of `rules/`, in the order of their names."""
    files = sorted((resources.files("posttrain_import") / "rules").iterdir(), key=lambda file: file.name)
    return [read_file(file) for file in files if file.name.endswith(".yaml")]


@cache
def programs() -> dict[str, Program]:
    """Name of a program -> its rules, of all files."""
    parts = {name: part for file in read_files() for name, part in file.get("parts", {}).items()}
    return {name: _program(section, parts) for file in read_files() for name, section in file["programs"].items()}


def _program(own: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]) -> Program:
    """A program of a file, with the rules of its parts; later ones replace earlier ones."""
    sections = [*(parts[name] for name in own.get("parts", ())), own]
    scalars = ("reads", "framework", "stage", "rows_of", "limit", "prefix", "command", "config", "otherwise")
    fields: dict[str, Any] = {key: section[key] for section in sections for key in scalars if key in section}
    rules: dict[str, Any] = {}
    kinds: dict[str, frozenset[str]] = dict.fromkeys(("switches", "several", "secret"), frozenset())
    for section in sections:
        cases = dict(section.get("rules", {}))
        for kind in ("no effect", "not supported"):
            cases |= {flag: {kind: why} for why, flags in section.get(kind, {}).items() for flag in flags}
        rules |= cases
        kinds = {kind: flags - cases.keys() | frozenset(section.get(kind, ())) for kind, flags in kinds.items()}
    fields |= kinds
    fields |= {key: tuple(own.get(key, ())) for key in ("files", "positions")}
    for kind in ("names", "writes", "defaults", "other names"):
        fields[kind.replace(" ", "_")] = {key: text for one in sections for key, text in one.get(kind, {}).items()}
    for flag, rule in rules.items():
        listed = rule if isinstance(rule, list) else [rule]
        rules[flag] = [{"key": case} if isinstance(case, str) else case for case in listed]
    return Program(
        **fields,
        rules=rules,
        implied=tuple(row for section in sections[-1:] + sections[:-1] for row in section.get("implied", ())),
        negation=any("negation" in section for section in sections),
    )


@cache
def _commands() -> list[dict[str, Any]]:
    """Patterns of words that run a program: those of `commands`, and the names of `scripts`."""
    entries = [entry for file in read_files() for entry in file.get("commands", ())]
    named = {name: section for file in read_files() for name, section in file["programs"].items()}
    entries += [
        {"word": fnmatch.translate(script), "program": name}
        for name, section in named.items()
        for script in section.get("scripts", ())
    ]
    return sorted(entries, key=lambda entry: "program" not in entry)


def find(word: str, after: Sequence[str]) -> tuple[Program, int, dict[str, str]] | None:
    """The program that `word` runs with the words `after`, how many of these words select it, and the flags that they are.

    Raises:
        InputError: the word names a program of a framework that has no importer.
    """
    line = ""
    for entry in _commands():
        match = re.fullmatch(entry["word"], word, re.S) or re.fullmatch(entry["word"], Path(word).name, re.S)
        if match is None:
            continue
        line = line or " ".join(re.sub(r"\s", "_", one) for one in after)
        arguments = re.match(entry.get("arguments", ""), line)
        if arguments is None:
            continue
        groups = {**match.groupdict(), **arguments.groupdict()}
        name = entry.get("program") or groups.pop("program")
        if "program" not in entry and name not in entry["programs"]:
            shown = f"{word} {arguments[0]}".strip()
            raise InputError(
                f"{shown} has no importer; those of {entry['of']} with one are {', '.join(entry['programs'])}"
            )
        given = {flag: value for flag, value in groups.items() if value is not None}
        return programs()[name], len(arguments[0].split()), given
    return None
