"""Flags of a command, the rows that rules make of them, and how values are read."""

import json
import math
import os
import re
from collections.abc import Callable, Mapping
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


def run_name(path: str, fallback: str) -> str:
    """A name for a run from the path at which a command saves its model."""
    parts = [part for part in Path(path).parts if part not in ("final", "ckpt", ".", "..", "/", "final_model")]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", parts[-1] if parts else "").strip("-.")
    return name or fallback


def data_path(text: str) -> Any:
    """Paths of a data flag: `json@FOLDER` and lists with commas become paths and lists."""
    paths = [re.sub(r"^\w+@", "", part.strip()) for part in text.split(",") if part.strip()]
    return paths[0] if len(paths) == 1 else paths


def warmup_note(updates: float, ratio: float) -> str:
    """How updates of warm-up follow from a share of all updates."""
    return f"{updates:g} updates x {ratio:g} = {updates * ratio:.4g}, rounded up"


def ceiling(number: float) -> int:
    """The next whole number; rounding errors of a product do not count."""
    return math.ceil(round(number, 9))


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
