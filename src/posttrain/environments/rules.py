"""Rules: functions that score an answer, given its row.

A rule is `function(answer, row) -> float`. It may return a mapping of names to numbers instead: `score` is the score and
the other numbers are only reported. A rule raises where it cannot score an answer; the episode then fails, which is not
a score of 0.
"""

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.errors import InputError

Rule = Callable[[str, dict[str, Any]], float | Mapping[str, float]]

SCORE = "score"
"""The name of the score among the numbers of a rule."""

_MARKER = re.compile(r"####|^[ \t]*A:", re.MULTILINE)
_NUMBER = re.compile(
    r"""(?<![0-9.])                           # not inside a number
        (?P<sign>(?<![\w)\]])[-−+])?          # a sign, unless something it could be subtracted from touches it
        [$€£¥]?(?P<late>(?<=[$€£¥])[-−])?     # $5, -$5 and $-5
        (?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)
        (?P<power>[eE][-+]?[0-9]{1,3}(?![0-9]))?""",
    re.VERBOSE,
)


def exact(answer: str, row: dict[str, Any]) -> float:
    """Return 1 if the answer equals `row["label"]`, ignoring surrounding white space; else 0."""
    return float(answer.strip() == _label(row))


def contains(answer: str, row: dict[str, Any]) -> float:
    """Return 1 if the answer contains `row["label"]`, case-sensitive; else 0. Long answers can contain many labels."""
    return float(_label(row) in answer)


def final_number(answer: str, row: dict[str, Any]) -> float:
    """Return 1 if the last number of the answer equals that of the reference, as GSM8K is scored; else 0.

    The reference is the first of `row["answer"]`, `row["completion"]` and `row["label"]` that the row has. Numbers are
    compared by value: 1,234.50 equals 1234.5, and currency signs are ignored. ValueError without a reference number.
    """
    for name in ("answer", "completion", "label"):
        if row.get(name) is not None:
            expected = last_number(str(row[name]))
            if expected is None:
                raise ValueError(f"final_number finds no number in the row's {name!r}: {str(row[name])[:80]!r}")
            return float(last_number(answer) == expected)
    raise ValueError("final_number needs a row with `answer`, `completion` or `label`")


def last_number(text: str) -> Decimal | None:
    """Return the final number of `text`; None where there is none.

    After the last `####`, or `A:` at the start of a line, this is the last number of the first non-empty line. Without
    such a marker it is the last number of the text.
    """
    markers = list(_MARKER.finditer(text))
    if markers:
        lines = text[markers[-1].end() :].strip().splitlines()
        text = lines[0] if lines else ""
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    number = numbers[-1]
    size = Decimal(number["digits"].replace(",", "") + (number["power"] or ""))
    return -size if number["sign"] in ("-", "−") or number["late"] else size


def load_rule(path: str) -> Rule:
    """Return the function at `module:function` or `path/to/file.py:function`; InputError if there is none."""
    module_path, _, name = path.rpartition(":")
    try:
        module = (
            _import_file(Path(module_path).resolve())
            if module_path.endswith(".py")
            else importlib.import_module(module_path)
        )
    except Exception as error:
        raise InputError(
            f"environment.rule: {module_path} cannot be imported ({type(error).__name__}: {error})"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"environment.rule: {module_path} has no function {name!r}; write `module:function`")
    return function


@lru_cache(maxsize=32)
def _import_file(path: Path) -> ModuleType:
    # The name is derived from the whole path, so that two files of the same name are two modules.
    name = f"posttrain_rule_{hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _label(row: dict[str, Any]) -> str:
    label = row.get("label")
    if label is None or not str(label).strip():
        raise ValueError("the row has no `label` to compare with")
    return str(label).strip()
