"""Files of predictions: the answers of models to prompts, with reference answers."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.data.files import read_rows
from posttrain.data.messages import Message, UnusableRow, as_messages, check_conversation, check_text, kind_of
from posttrain.data.problems import Problems
from posttrain.errors import InputError
from posttrain.evaluation.results import Results
from posttrain.recipe.base import BaseConfig
from posttrain.recipe.data import SourceRecipe

_CUT_OFF = ("turn_budget", "episode_budget", "length")
"""Stop reasons of truncated answers: those of posttrain, and that of OpenAI-compatible servers."""


class PredictionColumns(BaseConfig):
    """Column names of a predictions file."""

    id: str = "id"
    """Shared by the samples of one prompt; the prompt itself is used if the column is missing."""
    prompt: str = "prompt"
    """The prompt: text or a list of messages."""
    prediction: str = "prediction"
    """The answer as text; null marks a failed answer, which is left out."""
    reference: str = "reference"
    """The reference answer as text; rows without one are left out of the metrics that need it."""


@dataclass(frozen=True)
class Prediction:
    """One answer."""

    item: str
    """Samples of one prompt share an item; intervals are over items."""
    prompt: list[Message] | None
    text: str
    reference: str | None
    cut_off: bool
    """Whether the answer was truncated at the token limit."""
    row: dict[str, Any]
    """The whole row."""
    origin: str


@dataclass(frozen=True)
class Predictions:
    """The usable rows of a file, and the problems of the others."""

    path: str
    rows: list[Prediction]
    problems: Problems

    @property
    def items(self) -> int:
        return len({row.item for row in self.rows})

    def warnings(self) -> list[str]:
        """Messages on dropped rows and on truncated or empty answers."""
        messages = self.problems.summary()
        if cut_off := sum(row.cut_off for row in self.rows):
            messages.append(f"{cut_off} of {len(self.rows)} predictions are truncated")
        if empty := sum(not row.text.strip() for row in self.rows):
            messages.append(f"{empty} of {len(self.rows)} predictions are empty; they are scored like any other")
        return messages

    def digests(self) -> dict[str, str]:
        """Item -> digest of prompt and reference, to check that two files have the same items."""
        return {row.item: digest_of([row.prompt, row.reference]) for row in self.rows}

    def results(self) -> Results:
        """Results of this file, without metrics."""
        return Results(self.path, len(self.rows), self.items, self.warnings(), digests=self.digests())


def column_names(words: Sequence[str]) -> PredictionColumns:
    """Parse words such as `columns.prediction=output`; raises `InputError` for any other word."""
    names = {}
    for word in words:
        key, separator, value = word.removeprefix("--").partition("=")
        name = key.removeprefix("columns.")
        if not separator or name == key or name not in PredictionColumns.model_fields or not value:
            known = ", ".join(f"columns.{name}=NAME" for name in PredictionColumns.model_fields)
            raise InputError(f"{word!r} is not a column setting; use {known}")
        names[name] = value
    return PredictionColumns(**names)


def read_predictions(path: str, columns: PredictionColumns | None = None) -> Predictions:
    """Read the predictions of a .jsonl, .parquet, .json or .csv file.

    Unusable rows, such as an incomplete last line, are counted with their positions. Raises `InputError` if no row is
    usable.
    """
    names, problems = columns or PredictionColumns(), Problems()
    rows: list[Prediction] = []
    prompts: dict[str, list[Message] | None] = {}
    samples: set[tuple[str, str]] = set()
    if not Path(path).expanduser().exists():
        raise InputError(f"{path}: there is no such file or directory; correct the path")
    for origin, row in read_rows(SourceRecipe(path=path)):
        try:
            if isinstance(row, str):
                problems.add_text(row, origin)
                continue
            prediction = _prediction(row, origin, names)
            if prompts.setdefault(prediction.item, prediction.prompt) != prediction.prompt:
                raise UnusableRow("id of another prompt", f"`{names.id}` {prediction.item[:40]} has two prompts")
            sample = (prediction.item, str(row.get("sample")))
            if row.get("sample") is not None and sample in samples:
                raise UnusableRow("sample twice", f"duplicate sample {row['sample']} of {prediction.item[:40]}")
            samples.add(sample)
        except UnusableRow as problem:
            problems.add_text(str(problem), origin)
            continue
        problems.used += 1
        rows.append(prediction)
    if not rows and not problems.total:
        raise InputError(f"{path} has no rows; give a file with predictions")
    if not rows:
        raise InputError(
            f"{path}: no usable prediction: {problems.summary()[0]}; correct the file, or set its columns, for "
            "example `columns.prediction=NAME`"
        )
    return Predictions(path, rows, problems)


def _prediction(row: dict[str, Any], origin: str, names: PredictionColumns) -> Prediction:
    if names.prediction not in row:
        listed = ", ".join(f"`{name}`" for name in list(row)[:8]) or "none"
        raise UnusableRow("missing column", f"needs `{names.prediction}`, has {listed}")
    text = row[names.prediction]
    if text is None:
        raise UnusableRow("no prediction", str(row.get("error") or f"`{names.prediction}` is null"))
    if not isinstance(text, str):
        raise UnusableRow("wrong type", f"`{names.prediction}` is {kind_of(text)}, not text")
    check_text(text, f"`{names.prediction}`")
    prompt = None
    if row.get(names.prompt) is not None:
        prompt = as_messages(row[names.prompt], names.prompt, "user")
        check_conversation(prompt, answered=False)
    cut_off = row.get("stop_reason") in _CUT_OFF
    item = item_of(row, prompt, origin, names)
    return Prediction(item, prompt, text, _reference(row, names), cut_off, row, origin)


def _reference(row: dict[str, Any], names: PredictionColumns) -> str | None:
    reference = row.get(names.reference)
    if reference is None or (isinstance(reference, str) and not reference.strip()):
        return None
    if isinstance(reference, int | float) and not isinstance(reference, bool):
        return str(reference)
    if not isinstance(reference, str):
        raise UnusableRow("wrong type", f"`{names.reference}` is {kind_of(reference)}, not text")
    check_text(reference, f"`{names.reference}`")
    return reference


def item_of(row: dict[str, Any], prompt: Any, origin: str, names: PredictionColumns) -> str:
    """The item of a row: its id, else its prompt, else its seed, else its position.

    The seed is used only for rows without a prediction, because in a prediction it is a sampling seed. Raises
    `UnusableRow` for an id of a wrong type.
    """
    given = row.get(names.id)
    if isinstance(given, str | int) and not isinstance(given, bool):
        return str(given)
    if given is not None:
        raise UnusableRow("wrong type", f"`{names.id}` is {kind_of(given)}, not text or a whole number")
    if prompt is not None:
        return digest_of(prompt)
    if names.prediction not in row and row.get("seed") is not None:
        return str(row["seed"])
    return origin.rpartition(" row ")[2]


def digest_of(value: object) -> str:
    """BLAKE2b digest of a JSON value, 16 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def with_reference(rows: Sequence[Prediction]) -> tuple[list[Prediction], dict[str, int]]:
    """The rows with a reference, and the number of other rows. Raises `InputError` if no row has a reference."""
    known = [row for row in rows if row.reference is not None]
    if not known:
        raise InputError(
            "no row has a reference to compare with; add the column `reference`, or set its name in `columns.reference`"
        )
    return known, {"no reference": len(rows) - len(known)} if len(known) < len(rows) else {}
