"""Rules in YAML, `rules/*.yaml`: what each flag of a program becomes.

A file has `programs`, and `parts` that programs share. In `rules`, a flag has

- a key, or `{key: KEY, note: SENTENCE}`: the same value. `KEY as UNIT` converts it, see `_UNITS`;
- `{set: {KEY: VALUE}, note: SENTENCE}`: keys that are computed. `{{ EXPRESSION }}` in a value or sentence is evaluated by
  Jinja; its names are those of `_Scope`, and `names` of the program;
- `{choice: {VALUE: OURS}, key: KEY}`: a table of values; `{switch: {KEY: VALUE}}`: a flag without a value;
- `{no effect: WHY}`, `{remedy: REMEDY}`, or `{not supported: REMEDY, off: [VALUE]}`, which has no effect at `false` and the
  like, and at the values `off`;
- a list of such cases with `if: EXPRESSION`; the first that holds counts.

`no effect` and `not supported` of a program list the flags of each sentence. `switches`, `several` and `secret` name flags
without a value, with several words, and with a value that is not shown. `implied` has rows for behavior that no flag changes.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, cast

import yaml
from jinja2 import Undefined
from jinja2.runtime import Context, missing
from jinja2.sandbox import SandboxedEnvironment

from posttrain_import.programs import Program
from posttrain_import.rows import (
    NO_ROWS,
    Answer,
    Flags,
    Outcome,
    Row,
    Rule,
    ceiling,
    data_path,
    literal,
    run_name,
    warmup_note,
)


@dataclass(frozen=True)
class _Scope:
    """What the names of an expression stand for: values of a command, definitions of the program (`names`)."""

    flags: Flags
    names: Mapping[str, str]
    value: str = ""

    def __getitem__(self, name: str) -> Any:
        if name in self.names:
            return self.evaluate(self.names[name])
        if name == "typed":
            return literal(self.value)
        if name in ("text", "on", "number", "whole", "rows"):
            return getattr(self.flags, name)
        return {"value": self.value, "given": self.flags.__contains__}[name]

    def evaluate(self, expression: str) -> Any:
        return _compiled(expression)(scope=self)

    def fill(self, template: Any) -> Any:
        """A value of a rule: `{{ EXPRESSION }}` is its value, a text with expressions is a text, others are literals."""
        if isinstance(template, list):
            return [self.fill(one) for one in template]
        if match := _EXPRESSION.fullmatch(template):
            return self.evaluate(match[1])
        return self.note(template) if "{{" in template else literal(template)

    def note(self, template: str) -> str:
        return _template(template)(scope=self) if "{{" in template else template

    def keys(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Keys with their values; without those whose `if` has no `else` and is false."""
        filled = {key: self.fill(value) for key, value in values.items()}
        return {key: value for key, value in filled.items() if not isinstance(value, Undefined)}


class _Names(Context):
    """Names that the environment does not have are those of the scope; an unknown one is a LookupError."""

    def resolve_or_missing(self, key: str) -> Any:
        found = super().resolve_or_missing(key)
        return self.parent["scope"][key] if found is missing else found


class _Environment(SandboxedEnvironment):
    context_class = _Names


@cache
def _compiled(expression: str) -> Callable[..., Any]:
    return _environment.compile_expression(expression, undefined_to_none=False)


@cache
def _template(text: str) -> Callable[..., str]:
    return _environment.from_string(text).render


def _words(text: str) -> Any:
    """Names of modules; `all-linear` is one text."""
    return literal(text) if text == "all-linear" else text.split()


def _numbers(text: str) -> list[Any]:
    return [literal(word) for word in text.split()]


def _pair(text: str) -> tuple[Any, Any]:
    low, high = _numbers(text)
    return low, high


def _reward_functions(text: str) -> list[str]:
    """`FILE:FUNCTION` of each `MODULE.FUNCTION` of TRL."""
    known = {"accuracy_reward": "final_number"}
    return [known.get(name, name if ":" in name else ":".join(name.rsplit(".", 1))) for name in text.split()]


def _without_module(text: str) -> list[str]:
    """The reward functions that are only a name."""
    pairs = zip(text.split(), _reward_functions(text), strict=True)
    return [name for name, function in pairs if ":" not in function and name != "accuracy_reward"]


def _weighted(functions: list[str], weights: str) -> list[dict[str, Any]]:
    pairs = zip(functions, _numbers(weights), strict=True)
    return [{"function": function, "weight": weight} for function, weight in pairs]


_UNITS: dict[str, Callable[[str], Any]] = {
    "": literal,
    "text": str,
    "data": data_path,
    "words": _words,
    "numbers": _numbers,
}
"""`KEY as UNIT` -> the value of the key."""


_OFF = ("false", "none", "null", "", "0", "0.0")
"""Values at which a flag without a counterpart is off."""
_EXPRESSION = re.compile(r"\{\{((?:(?!\}\}).)*)\}\}")
_environment = _Environment()
_environment.globals |= {
    "folder": lambda path: str(Path(path).with_suffix("")),
    "as_list": lambda value: value if isinstance(value, list) else [value],
    "ceiling": ceiling,
    "float": float,
    "int": int,
    "literal": literal,
    "max": max,
    "min": min,
    "no_rows": NO_ROWS.format,
    "pair": _pair,
    "paths": data_path,
    "reward_functions": _reward_functions,
    "run_name": run_name,
    "short": "{:g}".format,
    "warmup_note": warmup_note,
    "weighted": _weighted,
    "without_module": _without_module,
}


def _answer(case: Mapping[str, Any], scope: _Scope) -> Answer:
    """The result of one case of a rule."""
    value, note = scope.value, scope.note(case.get("note", ""))
    keys = scope.keys(case.get("set", {}))
    if "no effect" in case:
        return Answer("no effect", {}, scope.note(case["no effect"]))
    if "not supported" in case:
        if value.lower() in (*_OFF, *case.get("off", ())):
            return Answer("no effect", {}, "off, as here")
        return Answer("not supported", {}, scope.note(case["not supported"]))
    if "remedy" in case:
        return Answer("not supported", keys, scope.note(case["remedy"]))
    if "switch" in case:
        ((key, setting),) = scope.keys(case["switch"]).items()
        if value.lower() in ("false", "0", "no"):
            if isinstance(setting, bool):
                return Answer("equal", {key: not setting}, note)
            return Answer("no effect", {}, "off, as here without the key")
        return Answer("equal", {key: setting}, note)
    if "choice" in case:
        return _chosen(case, scope, note)
    if "run" in case:
        name = run_name(value, case["run"])
        return Answer("converted", {"name": name}, f"the model is in `runs/{name}/model`")
    if "key" in case:
        names, _, unit = case["key"].partition(" as ")
        converted = _UNITS[unit](value)
        outcome = "converted" if unit == "data" and converted != value else "equal"
        return Answer(cast(Outcome, outcome), dict.fromkeys(names.split(", "), converted), note)
    outcome = scope.note(case.get("outcome", "converted" if keys else "no effect"))
    return Answer(cast(Outcome, outcome), keys, note)


def _chosen(case: Mapping[str, Any], scope: _Scope, note: str) -> Answer:
    """A value that is translated by a table. If the translation is a mapping, its keys are set instead of `key`."""
    text, choices, key = str(scope.fill(case.get("of", "{{ value }}"))), case["choice"], case.get("key", "")
    if text not in choices:
        remedy = f"the importer supports {', '.join(choices)}; see `posttrain recipe {key}`"
        return Answer("not supported", scope.keys(case.get("set", {})), scope.note(case.get("else", remedy)))
    value = choices[text]
    keys = scope.keys(value) if isinstance(value, dict) else {key: value}
    if not keys:
        return Answer("no effect", {}, note or "as here")
    outcome = scope.note(case.get("outcome", "equal" if keys == {key: text} else "converted"))
    return Answer(cast(Outcome, outcome), keys, note)


def _rule(cases: Any, names: Mapping[str, str], **kinds: bool) -> Rule:
    """A rule of the YAML: a key, a mapping, or cases of which the first with a true `if` counts."""

    def apply(value: str, flags: Flags) -> Answer:
        scope = _Scope(flags, names, value)
        for case in cases if isinstance(cases, list) else [cases]:
            case = {"key": case} if isinstance(case, str) else case
            if "if" not in case or scope.evaluate(case["if"]):
                return _answer(case, scope)
        raise LookupError("no rule for this value")

    return Rule(apply, **kinds)


def _implied(rows: list[Mapping[str, Any]], names: Mapping[str, str]) -> Callable[[Flags], Iterator[Row]]:
    """Rows for behavior that no flag changes."""

    def implied(flags: Flags) -> Iterator[Row]:
        scope = _Scope(flags, names)
        for row in rows:
            if "if" not in row or scope.evaluate(row["if"]):
                answer = _answer(row, scope)
                if answer.keys or answer.outcome == "not supported" or "no effect" in row:
                    yield Row(row["row"], scope.note(row["value"]), answer, True)

    return implied


@dataclass
class _Part:
    """Rules that programs share: the text of the YAML, and the flags with values of a special kind."""

    rules: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, dict[str, bool]] = field(default_factory=dict)

    def add(self, section: Mapping[str, Any]) -> None:
        """Add a section of a file. Its rules replace those of the same names."""
        rules = dict(section.get("rules", {}))
        for kind in ("no effect", "not supported"):
            for sentence, flags in section.get(kind, {}).items():
                rules |= {flag: {kind: sentence} for flag in flags}
        self.rules |= rules
        kinds = {"switches": "switch", "several": "many", "secret": "secret"}
        self.kinds |= {flag: {kind: flag in section.get(name, ()) for name, kind in kinds.items()} for flag in rules}


def read_file(file: Traversable) -> dict[str, Any]:
    """A YAML file in which every value is text."""
    return yaml.load(file.read_text(encoding="utf-8"), getattr(yaml, "CBaseLoader", yaml.BaseLoader))


def read_files() -> list[dict[str, Any]]:
    """The files of `rules/`, in the order of their names."""
    files = sorted((resources.files("posttrain_import") / "rules").iterdir(), key=lambda file: file.name)
    return [read_file(file) for file in files if file.name.endswith(".yaml")]


@cache
def programs() -> dict[str, Program]:
    """Name of a program -> its rules, of all files."""
    files = read_files()
    parts = {name: part for file in files for name, part in file.get("parts", {}).items()}
    return {name: _program(own, parts) for file in files for name, own in file["programs"].items()}


def _program(own: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]) -> Program:
    """A program of a file, with the rules of its parts; later ones replace earlier ones."""
    sections = [*(parts[name] for name in own.get("parts", ())), own]
    rules = _Part()
    names: dict[str, str] = {}
    defaults: dict[str, str] = {}
    implied: list[Mapping[str, Any]] = []
    for section in sections:
        rules.add(section)
        names |= section.get("names", {})
        defaults |= section.get("defaults", {})
    for section in sections[-1:] + sections[:-1]:
        implied += section.get("implied", [])
    fields: dict[str, Any] = {
        key: own[key] for key in ("framework", "stage", "rows_of", "limit", "prefix", "command") if key in own
    }
    fields |= {key: tuple(own[key]) for key in ("scripts", "files", "positions") if key in own}
    return Program(
        **fields,
        rules={flag: _rule(rule, names, **rules.kinds[flag]) for flag, rule in rules.rules.items()},
        defaults=defaults,
        implied=_implied(implied, names),
        other_names={name: flag for section in sections for name, flag in section.get("other names", {}).items()},
        negation=own.get("negation") == "true",
        arguments=tuple((int(place), value) for place, value in own.get("arguments", {}).items()),
    )
