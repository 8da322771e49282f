"""A few held-out rows of a supervised run as text, with their scores before and after training and the model's own reply."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

from pydantic import AfterValidator, TypeAdapter, ValidationError

from posttrain.errors import InputError
from posttrain.runs.directory import RunDirectory, write_atomically
from posttrain.runs.reader import is_file, read_json

LONGEST = 4_000
"""Characters that are kept of a text."""
_Text = Annotated[str, AfterValidator(lambda text: text[:LONGEST])]


@dataclass(frozen=True)
class RowAnswer:
    """An answer of a row, and its score."""

    name: str
    """`reference`, `chosen`, `rejected`, `good` or `bad`."""
    text: str
    before: float | None
    """The score of the model before training; None if it is unknown."""
    after: float | None


@dataclass(frozen=True)
class RowSample:
    """A held-out row."""

    origin: _Text
    prompt: _Text
    """What stands before the last answer, as the model reads it."""
    answers: Sequence[RowAnswer]
    measure: _Text
    """What the scores are."""
    reply: _Text = ""
    """The trained model's greedy reply to the prompt; empty for reward models."""


_SAMPLES = TypeAdapter(list[RowSample])


def write_samples(run: RunDirectory, samples: Sequence[RowSample]) -> None:
    """Write the rows to `rows/samples.json` of the run; raises `RunError` if that fails."""
    file = run.path / "rows" / "samples.json"
    write_atomically(file, json.dumps({"rows": [asdict(one) for one in samples]}, ensure_ascii=False, indent=1) + "\n")


def read_samples(run: RunDirectory) -> list[RowSample]:
    """The rows that `write_samples` wrote, none without the file; InputError if it has another form."""
    file = run.path / "rows" / "samples.json"
    if not is_file(file):
        return []
    try:
        return _SAMPLES.validate_python(read_json(file)["rows"])
    except (KeyError, ValidationError) as error:
        raise InputError(f"{file} has another form ({type(error).__name__}); delete it") from error
