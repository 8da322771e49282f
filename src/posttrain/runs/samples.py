"""A few held-out rows of a supervised run as text, with their scores before and after training and the model's own reply."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from posttrain.errors import InputError
from posttrain.runs.directory import RunDirectory, write_atomically
from posttrain.runs.reader import is_file, read_json

LONGEST = 4_000
"""Characters that are kept of a text."""


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

    origin: str
    prompt: str
    """What stands before the last answer, as the model reads it."""
    answers: Sequence[RowAnswer]
    measure: str
    """What the scores are."""
    reply: str = ""
    """The trained model's greedy reply to the prompt; empty for reward models."""


def write_samples(run: RunDirectory, samples: Sequence[RowSample]) -> None:
    """Write the rows to `rows/samples.json` of the run; raises `RunError` if that fails."""
    file = run.path / "rows" / "samples.json"
    file.parent.mkdir(exist_ok=True)
    write_atomically(file, json.dumps({"rows": [asdict(one) for one in samples]}, ensure_ascii=False, indent=1) + "\n")


def read_samples(run: RunDirectory) -> list[RowSample]:
    """The rows that `write_samples` wrote, none without the file; InputError if it has another form."""
    file = run.path / "rows" / "samples.json"
    if not is_file(file):
        return []
    try:
        samples = []
        for values in read_json(file)["rows"]:
            answers = [
                RowAnswer(str(one["name"]), str(one["text"]), *(_number(one[key]) for key in ("before", "after")))
                for one in values["answers"]
            ]
            texts = {key: str(values[key])[:LONGEST] for key in ("origin", "prompt", "measure", "reply")}
            samples.append(RowSample(answers=answers, **texts))
        return samples
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{file} has another form ({error!r}); delete it") from error


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
