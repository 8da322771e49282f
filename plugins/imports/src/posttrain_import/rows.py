"""Rows of the table of a command, and how values of flags are read."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from posttrain.recipe.sources import RecipeLoader

SET = "set"
"""The value recorded for a flag that takes no value."""


@dataclass(frozen=True)
class Answer:
    """The result of a rule for a flag: keys of the recipe with their values, and a note that explains it.

    `outcome`: equal, converted, no effect, not supported, or unknown. `before`: a command that makes what the keys name.
    """

    outcome: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    before: str = ""


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


def literal(text: str) -> Any:
    """The value of `text` as YAML reads it: numbers, true, false, null, lists; otherwise the text."""
    # No flag has such a list, and YAML takes minutes to read deep ones and long chains of aliases.
    if text.count("[") + text.count("{") + text.count("*") > 50:
        return text
    try:
        value = yaml.load(text, RecipeLoader)
    except (yaml.YAMLError, ValueError, RecursionError):  # also of numbers with too many digits
        return text
    if value is None and text.strip().lower() not in ("null", "~"):
        return None if text.strip().lower() == "none" else text
    return text if isinstance(value, dict) else {"True": True, "False": False}.get(str(text), value)


def run_name(path: str, fallback: str) -> str:
    """A name for a run from the path at which a command saves its model."""
    parts = [part for part in Path(path).parts if part not in ("final", "ckpt", ".", "..", "/", "final_model")]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", parts[-1] if parts else "").strip("-.")
    return name or fallback


def data_path(text: str) -> str | list[str]:
    """Paths of a data flag: `json@FOLDER` and lists with commas become paths and lists, and a folder of this machine with
    a training split the files of that split."""
    paths = [re.sub(r"^\w+@", "", part.strip()) for part in text.split(",") if part.strip()]
    split = {path: sorted(map(str, Path(path).glob("*train*.*"))) for path in paths if os.path.isdir(path)}
    paths = [file for path in paths for file in split.get(path) or [path]]
    return paths[0] if len(paths) == 1 else paths


def count_rows(path: str) -> int | None:
    """Rows of a local `.jsonl`, `.json` or `.parquet` file; None if there is no such file, or if a JSON file, which is
    read as a whole, is larger than 256 MiB."""
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
    if file.suffix == ".json" and file.stat().st_size <= 256 << 20:
        rows = json.loads(file.read_text(encoding="utf-8"))
        return len(rows) if isinstance(rows, list) else None
    return None
