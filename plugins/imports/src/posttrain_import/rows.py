"""Rules for the flags of a command, and the rows that they give."""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from posttrain.errors import InputError
from posttrain.recipe.sources import RecipeLoader

Outcome = Literal["equal", "converted", "no effect", "not supported", "unknown"]
SET = "set"
"""The value recorded for a flag that takes no value."""
HIDDEN = "..."
"""Shown instead of a secret value."""
LONG = 1_000
"""Steps between checkpoints of a command that writes checkpoints only at its end."""


@dataclass(frozen=True)
class Answer:
    """The result of a rule for a flag: keys of the recipe with their values, and a note that explains it."""

    outcome: Outcome
    keys: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One line of the table. `implied`: the command leaves the value to its framework."""

    flag: str
    value: str
    answer: Answer
    implied: bool = False

    @property
    def label(self) -> str:
        """The flag, in brackets if the command does not have it."""
        return f"({self.flag})" if self.implied else self.flag


@dataclass
class Flags:
    """The flags of one command with their values as text, defaults included.

    `rows`: number of training rows or prompts, None if it is not known.
    """

    given: dict[str, str]
    defaults: Mapping[str, str] = field(default_factory=dict)
    rows: int | None = None
    repeated: frozenset[str] = frozenset()

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def text(self, name: str, default: str = "") -> str:
        return self.given.get(name, self.defaults.get(name, default))

    def on(self, name: str) -> bool:
        """Whether a switch is set."""
        return self.text(name, "false").lower() not in ("false", "none", "null", "", "0", "no")

    def number(self, name: str, default: float | None = None) -> float:
        """The value as a number. Raises InputError if it is not a number."""
        missing = self.text(name).lower() in ("", "null", "none")
        value = default if missing and default is not None else literal(self.text(name))
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise InputError(f"{name} is {self.text(name) or 'missing'}; it must be a number")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value):
            raise InputError(f"{name} is {value}; it must be a whole number")
        return int(value)


@dataclass(frozen=True)
class Rule:
    """How a flag is read. `switch`: it takes no value. `many`: it takes several words. `secret`: its value is not shown."""

    apply: Callable[[str, Flags], Answer]
    switch: bool = False
    many: bool = False
    secret: bool = False


_BRACKETS = 50


def literal(text: str) -> Any:
    """The value of `text` as YAML reads it: numbers, true, false, null, lists; otherwise the text."""
    # No flag has such a list, and YAML takes minutes to read deep ones and long chains of aliases.
    if text.count("[") + text.count("{") + text.count("*") > _BRACKETS:
        return text
    try:
        value = yaml.load(text, RecipeLoader)
    except (yaml.YAMLError, ValueError, RecursionError):  # also of numbers with too many digits
        return text
    if value is None and text.strip().lower() not in ("null", "~"):
        return None if text.strip().lower() == "none" or not text.strip() else text
    return text if isinstance(value, dict) else {"True": True, "False": False}.get(str(text), value)


def equal(*keys: str, note: str = "", words: bool = False) -> Rule:
    """The same value under other names. `words`: it stays text."""
    return Rule(lambda text, _: Answer("equal", dict.fromkeys(keys, text if words else literal(text)), note))


def switch(key: str, value: Any = True, note: str = "") -> Rule:
    """A flag without a value that sets `key`; with `false`, it does nothing."""

    def apply(text: str, _: Flags) -> Answer:
        off = text.lower() in ("false", "0", "no")
        if off and isinstance(value, bool):
            return Answer("equal", {key: not value}, note)
        return Answer("no effect", {}, "off, as here without the key") if off else Answer("equal", {key: value}, note)

    return Rule(apply, switch=True)


def without_effect(reason: str, flag: bool = False) -> Rule:
    """A flag that changes nothing here. `flag`: it takes no value."""
    return Rule(lambda *_: Answer("no effect", {}, reason), switch=flag)


def unsupported(remedy: str, flag: bool = False, off: tuple[str, ...] = ("false", "none", "null", "", "0")) -> Rule:
    """A flag without a counterpart, with what to do instead; at one of the values `off` it changes nothing."""

    def apply(text: str, _: Flags) -> Answer:
        if text.lower() in off:
            return Answer("no effect", {}, "off, as here")
        return Answer("not supported", {}, remedy)

    return Rule(apply, switch=flag)


def choice(key: str, values: Mapping[str, Any], note: str = "", notes: Mapping[str, str] | None = None) -> Rule:
    """A value that is translated by a table. If the translation is a mapping, its keys are set instead of `key`."""

    def apply(text: str, _: Flags) -> Answer:
        if text not in values:
            return Answer(
                "not supported", {}, f"the importer supports {', '.join(values)}; see `posttrain recipe {key}`"
            )
        value = values[text]
        keys = value if isinstance(value, dict) else {key: value}
        said = (notes or {}).get(text, note)
        if not keys:
            return Answer("no effect", {}, said or "as here")
        return Answer("equal" if keys == {key: text} else "converted", keys, said)

    return Rule(apply)


def converted(make: Callable[[Flags], tuple[Mapping[str, Any], str]], flag: bool = False, many: bool = False) -> Rule:
    """Keys and arithmetic that depend on several flags."""

    def apply(_: str, flags: Flags) -> Answer:
        keys, note = make(flags)
        return Answer("converted" if keys else "no effect", keys, note)

    return Rule(apply, switch=flag, many=many)


def run_name(path: str, fallback: str) -> str:
    """A name for a run from the path at which a command saves its model."""
    parts = [part for part in Path(path).parts if part not in ("final", "ckpt", ".", "..", "/", "final_model")]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", parts[-1] if parts else "").strip("-.")
    return name or fallback


def named(fallback: str) -> Rule:
    """The name of the run from an output path."""

    def apply(text: str, _: Flags) -> Answer:
        name = run_name(text, fallback)
        return Answer("converted", {"name": name}, f"the model is in `runs/{name}/model`")

    return Rule(apply)


def data_path(text: str) -> Any:
    """Paths of a data flag: `json@FOLDER` and lists with commas become paths and lists."""
    paths = [re.sub(r"^\w+@", "", part.strip()) for part in text.split(",") if part.strip()]
    return paths[0] if len(paths) == 1 else paths


def data(*keys: str, note: str = "") -> Rule:
    """Data files, or a data set of the hub."""

    def apply(text: str, _: Flags) -> Answer:
        path = data_path(text)
        outcome: Outcome = "equal" if path == text else "converted"
        return Answer(outcome, dict.fromkeys(keys, path), note)

    return Rule(apply)


def warmup(
    updates: float, ratio: float, keys: Iterable[str] = ("optimizer.warmup_updates",)
) -> tuple[dict[str, Any], str]:
    """Updates of warm-up as a share of all updates, rounded up."""
    count = math.ceil(round(updates * ratio, 9))
    return dict.fromkeys(keys, count), f"{updates:g} updates x {ratio:g} = {updates * ratio:.4g}, rounded up"


_MOST_BYTES = 256 << 20
"""Maximum size of a JSON file whose rows are counted. It is read as a whole."""


def count_rows(path: str) -> int | None:
    """Rows of a local `.jsonl`, `.json` or `.parquet` file; None if there is no such file."""
    file = Path(path).expanduser()
    if not os.path.isfile(file):  # false for a name that is too long
        return None
    if file.suffix == ".jsonl":
        with file.open("rb") as lines:
            rows, blank = 0, True
            while part := lines.readline(1 << 20):
                blank = blank and not part.strip()
                if part.endswith(b"\n"):
                    rows, blank = rows + (not blank), True
            return rows + (not blank)
    if file.suffix == ".parquet":
        from pyarrow import parquet

        return int(parquet.read_metadata(file).num_rows)
    if file.suffix == ".json" and file.stat().st_size <= _MOST_BYTES:
        rows = json.loads(file.read_text(encoding="utf-8"))
        return len(rows) if isinstance(rows, list) else None
    return None


NO_ROWS = "the number of training rows is not known; import again with `--rows N`, or set {} yourself"
"""Note on a key that is computed from the number of rows."""
