"""Rules that score an answer with the row it belongs to, and where rules are found.

A rule is `function(answer, row) -> float`, or gives a mapping of names to numbers, one of them `score`, of which the
others are only reported. It raises where it cannot tell; the episode then fails instead of being paid nothing.
"""

import importlib
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from posttrain.errors import InputError
from posttrain.recipe.components import module_of_file

Rule = Callable[[str, dict[str, Any]], float | Mapping[str, float]]

SCORE = "score"
"""The name of what pays, among the numbers of a rule."""

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
    """1 where the answer is `row["label"]`, white space at both ends aside; else 0."""
    return float(answer.strip() == _label(row))


def contains(answer: str, row: dict[str, Any]) -> float:
    """1 where `row["label"]` stands somewhere in the answer, spelt alike; else 0. A long answer may hold many."""
    return float(_label(row) in answer)


def final_number(answer: str, row: dict[str, Any]) -> float:
    """1 where the answer ends in the number that the reference ends in, as GSM8K is scored; else 0.

    The reference is the first of `row["answer"]`, `row["completion"]` and `row["label"]` that the row has. Numbers
    are compared by value: 1,234.50 is 1234.5, and currency signs do not count.
    """
    for name in ("answer", "completion", "label"):
        if row.get(name) is not None:
            wanted = last_number(str(row[name]))
            if wanted is None:
                raise ValueError(f"final_number finds no number in the row's {name!r}: {str(row[name])[:80]!r}")
            return float(last_number(answer) == wanted)
    raise ValueError("final_number needs a row with `answer`, `completion` or `label`")


def last_number(text: str) -> Decimal | None:
    """The number that `text` concludes with, None where there is none.

    After the last `####`, or `A:` at the start of a line, it is the last number of the first line that is not empty;
    without such a marker the last number of the text.
    """
    markers = list(_MARKER.finditer(text))
    if markers:
        lines = text[markers[-1].end() :].strip().splitlines()
        text = lines[0] if lines else ""
    found = list(_NUMBER.finditer(text))
    if not found:
        return None
    number = found[-1]
    size = Decimal(number["digits"].replace(",", "") + (number["power"] or ""))
    return -size if number["sign"] in ("-", "−") or number["late"] else size


def load_rule(where: str) -> Rule:
    """The function that `where` names, `module:function` or `path/to/file.py:function`; InputError if there is none."""
    place, _, name = where.rpartition(":")
    try:
        module = module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise InputError(f"environment.rule: {place} cannot be imported ({type(error).__name__}: {error})") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"environment.rule: {place} has no function {name!r}; write `module:function`")
    return function


def _label(row: dict[str, Any]) -> str:
    label = row.get("label")
    if label is None or not str(label).strip():
        raise ValueError("the row has no `label` to compare with")
    return str(label).strip()
