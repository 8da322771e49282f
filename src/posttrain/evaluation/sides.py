"""What is compared: run directories, results files, and files of predictions or scores, read into item scores."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from posttrain.data.files import read_rows
from posttrain.data.messages import UnusableRow, as_messages
from posttrain.data.problems import Problems
from posttrain.episode import Episode, Outcome
from posttrain.errors import InputError
from posttrain.evaluation.predictions import PredictionColumns, column_names, item_of, read_predictions
from posttrain.evaluation.results import read_results
from posttrain.evaluation.scores import ItemScores, item_means
from posttrain.evaluation.summary import knows_success, reported
from posttrain.evaluation.text_metrics import Measured, corpus_metric, exact_match
from posttrain.recipe.data import SourceRecipe
from posttrain.rollout.store import read_episodes, stored_steps
from posttrain.runs.directory import RunDirectory

_NO_SCORES = ("seed", "sample", "tokens", "index")
"""Numeric columns that say what a row is, and not how good."""


@dataclass(frozen=True)
class Run:
    """One training run, or one file, of a side."""

    path: str
    metrics: dict[str, Measured]
    digests: dict[str, str] = field(default_factory=dict)
    """Item -> digest of what it asks, where that is known."""
    environment: dict[str, Any] | None = None
    """Keys of the environment that was played."""
    remarks: list[str] = field(default_factory=list)

    @property
    def items(self) -> frozenset[str]:
        return frozenset(item for one in self.metrics.values() for item in one.scores.items)


@dataclass(frozen=True)
class Side:
    """What is compared with another side: several runs of one recipe with different training seeds, or one."""

    name: str
    runs: list[Run]


def read_sides(words: Sequence[str], metrics: Sequence[str] | None = None) -> list[Side]:
    """Sides out of words: `PATH`, `PATH,PATH` for several runs of a side, `name=PATH,PATH`, and `columns.NAME=COLUMN`.

    `metrics`: the only ones to read; None takes all that a path holds. InputError for what cannot be read.
    """
    columns = column_names([word for word in words if word.startswith("columns.")])
    found = []
    for word in [word for word in words if not word.startswith("columns.")]:
        name, separator, listed = word.partition("=")
        named = bool(separator) and not Path(word).exists()
        paths = _paths(listed if named else word)
        found.append(Side(name if named else _name(paths), [_read(path, metrics, columns) for path in paths]))
    for side in found:
        if len({run.path for run in side.runs}) < len(side.runs):
            raise InputError(f"{side.name} names a run twice; a run counts once")
    contents = [sorted(run.path for run in side.runs) for side in found]
    if repeated_side := next(
        (side for side, own in zip(found, contents, strict=True) if contents.count(own) > 1), None
    ):
        raise InputError(f"{repeated_side.name} stands on two sides; name what it is compared with")
    names = [side.name for side in found]
    if len(set(names)) == len(names):
        return found
    return [Side(",".join(run.path for run in side.runs), side.runs) for side in found]


def _paths(text: str) -> list[str]:
    paths = [text] if Path(text).exists() else [path for path in text.split(",") if path]
    if not paths:
        raise InputError(f"{text!r} names nothing to compare; give run directories or files")
    return paths


def _name(paths: Sequence[str]) -> str:
    names = [Path(path).name or path for path in paths]
    return names[0] if len(names) == 1 else ",".join(names)


def _read(path: str, metrics: Sequence[str] | None, columns: PredictionColumns) -> Run:
    file = Path(path).expanduser()
    if file.is_dir():
        run = _read_run(path)
    elif file.suffix.lower() == ".json" and _is_results(file):
        known, digests = read_results(file)
        run = Run(path, known, digests)
    else:
        run = _read_rows(path, metrics, columns)
    if metrics is not None:
        absent = [name for name in metrics if name not in run.metrics]
        if absent:
            every = [*run.metrics, *(() if file.is_dir() else _read(path, None, columns).metrics)]
            has = ", ".join(dict.fromkeys(every)) or "none"
            raise InputError(f"{path} has no metric {absent[0]!r}; it has {has}")
        run = Run(path, {name: run.metrics[name] for name in metrics}, run.digests, run.environment, run.remarks)
    if not run.metrics:
        raise InputError(f"{path} holds nothing to compare by; give scores, references or a finished run")
    return run


def _is_results(file: Path) -> bool:
    if not file.is_file():
        raise InputError(f"{file}: there is no such file or directory; correct the path")
    return file.read_bytes().lstrip()[:1] == b"{"


def _read_run(path: str) -> Run:
    """The final episodes of a run: those of the trained model where the store also has those of its start."""
    run = RunDirectory.open(path)
    finals = [stored for stored in stored_steps(run.episodes) if stored.split == "final"]
    if not finals:
        raise InputError(f"{path} has no final episodes yet; let it finish, or evaluate its model")
    stored = max(finals, key=lambda step: step.step)
    episodes = read_episodes(stored.path).episodes
    recipe = run.load_recipe()
    environment = getattr(recipe, "environment", None)
    failed = sum(episode.outcome is Outcome.FAILED for episode in episodes)
    remarks = [f"{path}: final episodes of step {stored.step}"] if len(finals) > 1 else []
    if failed:
        remarks.append(f"{path}: {failed} of {len(episodes)} episodes failed; not successful, and without a return")
    return Run(
        path, _of_episodes(episodes), {}, None if environment is None else environment.model_dump(mode="json"), remarks
    )


def _of_episodes(episodes: Sequence[Episode]) -> dict[str, Measured]:
    played = [episode for episode in episodes if episode.outcome is not Outcome.FAILED]
    found: dict[str, ItemScores] = {}
    if knows_success(episodes):
        found["success"] = item_means("rate", ((str(e.seed), float(e.success)) for e in episodes))
    if played:
        found["return"] = item_means("mean", ((str(e.seed), e.total_reward) for e in played))
    for name in dict.fromkeys(name for episode in episodes for name in reported(episode)):
        values = [(str(e.seed), reported(e)[name]) for e in episodes if name in reported(e)]
        found[name] = item_means(_kind([value for _, value in values]), values)
    return {name: Measured(name, scores, texts=len(scores)) for name, scores in found.items()}


def _read_rows(path: str, metrics: Sequence[str] | None, columns: PredictionColumns) -> Run:
    """Predictions, which are measured against their references, or rows of numbers."""
    if not Path(path).expanduser().exists():
        raise InputError(f"{path}: there is no such file or directory; correct the path")
    listed, problems = list(read_rows(SourceRecipe(path=path))), Problems()
    if not listed:
        raise InputError(f"{path}: there are no rows in it; write some, or name another file")
    rows: list[tuple[str, dict[str, Any]]] = []
    for origin, row in listed:
        try:
            if isinstance(row, str):
                raise UnusableRow(*row.split(": ", 1))
            rows.append((item_of(row, _prompt(row, columns.prompt), origin, columns), row))
        except UnusableRow as problem:
            problems.add_text(str(problem), origin)
    scored = _numbers(rows, columns)
    if not any(columns.prediction in row for _, row in rows):
        remarks = [f"{path}: {line}" for line in problems.summary()]
        lost = {name: count for name, count in scored.lost.items() if metrics is None or name in metrics}
        remarks += [f"{path}: {count} rows without a number in {name}" for name, count in lost.items() if count]
        if (items := len({item for item, _ in rows})) < len(rows):
            remarks.append(f"{path}: {len(rows)} rows are of {items} items, each the mean of its rows")
        return Run(path, scored.metrics, {}, None, remarks)
    predictions = read_predictions(path, columns)
    found = dict(scored.metrics) if metrics is not None else {}
    for name in ("exact", "bleu", "chrf"):
        wanted = metrics is None or name in metrics
        if wanted and name not in found and any(row.reference is not None for row in predictions.rows):
            found[name] = exact_match(predictions.rows) if name == "exact" else _corpus(name, predictions.rows)
    dropped = [f"{path}: {line}" for line in predictions.notes()]
    return Run(path, found, predictions.digests(), None, dropped)


def _corpus(name: str, rows: Any) -> Measured:
    return corpus_metric("bleu" if name == "bleu" else "chrf", rows)


@dataclass(frozen=True)
class _Numbers:
    metrics: dict[str, Measured]
    lost: dict[str, int]
    """Rows without a number, per column."""


def _numbers(rows: Sequence[tuple[str, dict[str, Any]]], columns: PredictionColumns) -> _Numbers:
    """The columns of numbers or of true and false of (item, row); a null or a NaN is no number and left out."""
    names = [
        name
        for name in dict.fromkeys(name for _, row in rows for name in row)
        if name not in (columns.id, *_NO_SCORES) and any(_is_number(row.get(name)) for _, row in rows)
    ]
    metrics, lost = {}, {}
    for name in names:
        values = [(item, float(row[name])) for item, row in rows if _is_number(row.get(name))]
        lost[name] = len(rows) - len(values)
        metrics[name] = Measured(name, item_means(_kind([value for _, value in values]), values), texts=len(values))
    return _Numbers(metrics, lost)


def _prompt(row: dict[str, Any], name: str) -> Any:
    """The prompt as predictions have it, or as it stands where it is no conversation."""
    try:
        return None if row.get(name) is None else as_messages(row[name], name, "user")
    except UnusableRow:
        return row[name]


def _kind(values: Sequence[float]) -> Literal["rate", "mean"]:
    return "rate" if set(values) <= {0.0, 1.0} else "mean"


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) and math.isfinite(value)
