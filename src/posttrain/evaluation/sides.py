"""The sides of a comparison: run directories, results files, and files of predictions or scores, as item scores."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.data.files import read_rows
from posttrain.data.messages import UnusableRow, as_messages
from posttrain.data.problems import Problems
from posttrain.episode import Episode, Outcome, reports_success, score_names
from posttrain.errors import InputError
from posttrain.evaluation.predictions import Prediction, PredictionColumns, column_names, item_of, read_predictions
from posttrain.evaluation.results import MetricResult, read_results
from posttrain.evaluation.statistics import ItemScores, item_means
from posttrain.evaluation.text_metrics import corpus_metric, exact_match
from posttrain.recipe.data import SourceRecipe
from posttrain.recipe.rollout import return_source
from posttrain.rollout.store import read_episodes, stored_steps
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import read_metrics
from posttrain.runs.reader import LARGEST, open_file, read_json
from posttrain.runs.tables import UNIMPROVED, read_run_results

_NO_SCORES = ("seed", "sample", "tokens", "index")
"""Numeric columns that identify a row and are not scores."""


@dataclass(frozen=True)
class Run:
    """One training run or one file."""

    path: str
    metrics: dict[str, MetricResult]
    digests: dict[str, str] = field(default_factory=dict)
    """Item -> digest of its prompt and reference, if known."""
    environment: dict[str, Any] | None = None
    """The `environment` section of the recipe; None for a file."""
    details: list[str] = field(default_factory=list)
    """Messages about data that was read or dropped."""
    seed: int | None = None
    """The training seed; None for a file."""

    @property
    def items(self) -> frozenset[str]:
        return frozenset(item for one in self.metrics.values() for item in one.scores.items)


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a run, or several runs of one recipe with different training seeds."""

    name: str
    runs: list[Run]

    def having(self, metric: str) -> list[Run]:
        """The runs with the metric."""
        return [run for run in self.runs if metric in run.metrics]

    def scores(self, metric: str) -> list[ItemScores]:
        """The scores of each run with the metric."""
        return [run.metrics[metric].scores for run in self.having(metric)]


def read_sides(words: Sequence[str], metrics: Sequence[str] | None = None) -> list[Side]:
    """Parse and read sides: `PATH`, `PATH,PATH`, `name=PATH,PATH`, `columns.NAME=COLUMN`.

    A path is a run directory, a file, or a directory of results files, which are one run. Several paths of a side are runs
    with different training seeds, or one run if they have different metrics. `metrics`: the metrics to read; None reads all.
    Raises `InputError` for anything that cannot be read, and for a metric that no side has.
    """
    columns = column_names([word for word in words if word.startswith("columns.")])
    named: list[tuple[str, list[str]]] = []
    for word in [word for word in words if not word.startswith("columns.")]:
        name, separator, listed = word.partition("=")
        has_name = bool(separator) and not Path(word).exists()
        text = listed if has_name else word
        paths = [text] if Path(text).exists() else [path for path in text.split(",") if path]
        if not paths:
            raise InputError(f"{text!r} contains no path; give run directories or files")
        named.append((name if has_name else ",".join(Path(path).name or path for path in paths), paths))
    sides = [Side(name, _runs(name, paths, metrics, columns)) for name, paths in named]
    for side in sides:
        if len({run.path for run in side.runs}) < len(side.runs):
            raise InputError(f"{side.name} contains a run twice; give every run once")
    contents = [sorted(paths) for _, paths in named]
    repeated = next((name for (name, paths) in named if contents.count(sorted(paths)) > 1), None)
    if repeated is not None:
        raise InputError(f"{repeated} is given on two sides; give different sides")
    known = {name for side in sides for run in side.runs for name in run.metrics}
    if absent := [name for name in metrics or () if name not in known]:
        files = [file for _, paths in named for path in paths for file in _results_in(path, [])]
        every = [name for file in files for name in _read(file, None, columns).metrics]
        raise InputError(f"no side has the metric {absent[0]!r}; they have {', '.join(dict.fromkeys(every)) or 'none'}")
    if len({side.name for side in sides}) == len(sides):
        return sides
    return [Side(",".join(paths), side.runs) for side, (_, paths) in zip(sides, named, strict=True)]


def _runs(name: str, paths: Sequence[str], metrics: Sequence[str] | None, columns: PredictionColumns) -> list[Run]:
    """The runs of a side."""
    runs = []
    for path in paths:
        details: list[str] = []
        files = [_read(file, metrics, columns) for file in _results_in(path, details)]
        runs.append(files[0] if len(files) == 1 and not details else _merged(path, files, details))
    counts = [metric for run in runs for metric in run.metrics]
    if len(runs) > 1 and len(set(counts)) == len(counts):
        runs = [_merged(name, runs, ())]
    if not counts and metrics is None:
        raise InputError(f"{', '.join(paths)} has no metrics to compare; give scores, references or a finished run")
    return runs


def _results_in(path: str, details: list[str]) -> list[str]:
    """The results files of a directory that is not a run, otherwise `path`. Other JSON files are noted in `details`."""
    folder = Path(path).expanduser()
    if not folder.is_dir() or (folder / "recipe.yaml").is_file():
        return [path]
    files = []
    for file in sorted(folder.rglob("*.json")):
        try:
            values = read_json(file, LARGEST)
        except InputError:
            values = {}
        if {"format", "metrics"} <= set(values):
            files.append(str(file))
        else:
            details.append(f"{file}: skipped, it is not a results file")
    if not files:
        raise InputError(
            f"{path} contains no results file; write results there with `--out`, for example `posttrain evaluate text "
            f"FILE --out {folder / 'text.json'}`"
        )
    return files


def _merged(name: str, runs: Sequence[Run], details: Sequence[str]) -> Run:
    """Runs with different metrics as one run with the path `name`."""
    metrics: dict[str, MetricResult] = {}
    digests: dict[str, str] = {}
    for run in runs:
        if repeated := next((metric for metric in run.metrics if metric in metrics), None):
            origin = next(one.path for one in runs if repeated in one.metrics)
            raise InputError(
                f"{name}: {repeated} is in {origin} and in {run.path}; name the files to use, one for each metric"
            )
        metrics |= run.metrics
        different = [item for item, digest in run.digests.items() if digests.setdefault(item, digest) != digest]
        if different:
            raise InputError(
                f"{name}: item {different[0][:40]} of {run.path} has another prompt or reference than in the files before it; "
                "give results on the same data"
            )
    environment = next((run.environment for run in runs if run.environment is not None), None)
    return Run(name, metrics, digests, environment, [*details, *(line for run in runs for line in run.details)])


def _read(path: str, metrics: Sequence[str] | None, columns: PredictionColumns) -> Run:
    file = Path(path).expanduser()
    if file.is_dir():
        run = _read_run(path)
    elif not file.exists():
        raise InputError(f"{path}: there is no such file or directory; correct the path")
    else:
        is_results = False
        if file.suffix.lower() == ".json":
            with open_file(file.resolve()) as opened:  # a file that the user names may be a link
                is_results = opened.read(1 << 10).lstrip()[:1] == b"{"
        run = Run(path, *read_results(file.resolve())) if is_results else _read_rows(path, metrics, columns)
    if metrics is not None:
        run = replace(run, metrics={name: run.metrics[name] for name in metrics if name in run.metrics})
    return run


def _read_run(path: str) -> Run:
    """Read the final episodes of a run: those of the latest step, if the store also has those of the initial model."""
    run = RunDirectory.open(path)
    finals = [stored for stored in stored_steps(run.episodes) if stored.split == "final"]
    recipe = run.load_recipe()
    environment = getattr(recipe, "environment", None)
    if not finals and environment is None:
        raise InputError(
            f"{path}: a run of stage {recipe.stage} without an environment has no final episodes; let `posttrain generate` "
            "complete rows with its model, and compare those files"
        )
    if not finals:
        raise InputError(f"{path} has no final episodes yet; wait until it finishes, or evaluate its model")
    stored = max(finals, key=lambda step: step.step)
    episodes = read_episodes(stored.path).episodes
    failed = sum(episode.outcome is Outcome.FAILED for episode in episodes)
    details = [f"{path}: final episodes of step {stored.step}"] if len(finals) > 1 else []
    if any(line.get("chosen") == UNIMPROVED for line in read_metrics(run.metrics)):
        details.append(f"{path}: {UNIMPROVED}")
    if failed:
        details.append(
            f"{path}: {failed} of {len(episodes)} episodes failed; they count as unsuccessful, without a return"
        )
    given = read_run_results(run.path).return_source or return_source(recipe)
    played = None if environment is None else environment.model_dump(mode="json")
    return Run(path, episode_metrics(episodes, given), {}, played, details, recipe.seed)


def episode_metrics(episodes: Sequence[Episode], reward: str) -> dict[str, MetricResult]:
    """The metrics of episodes; `reward`: what gave their returns."""
    episodes = [episode for episode in episodes if episode.outcome is not Outcome.UNSCORED]
    played = [episode for episode in episodes if episode.has_return]
    metrics: dict[str, ItemScores] = {}
    if reports_success(episodes):
        metrics["success"] = item_means("rate", ((str(e.seed), float(e.success)) for e in episodes))
    if played:
        metrics["return"] = item_means("mean", ((str(e.seed), e.total_reward) for e in played))
    for name in score_names(episodes):
        values = [(str(e.seed), e.scores[name]) for e in episodes if name in e.scores]
        metrics[name] = item_means(None, values)
    about = {"return": {"reward": reward}} if reward else {}
    return {
        name: MetricResult(name, scores, texts=len(scores), about=about.get(name, {}))
        for name, scores in metrics.items()
    }


def _read_rows(path: str, metrics: Sequence[str] | None, columns: PredictionColumns) -> Run:
    """Read predictions, which are compared with their references, or rows of numbers."""
    listed, problems = list(read_rows(SourceRecipe(path=path))), Problems()
    if not listed:
        raise InputError(f"{path} has no rows; give another file")
    rows: list[tuple[str, dict[str, Any]]] = []
    for origin, row in listed:
        try:
            if isinstance(row, str):
                raise UnusableRow(*row.split(": ", 1))
            prompt = row.get(columns.prompt)
            with suppress(UnusableRow):  # a prompt that is no conversation identifies the row unchanged
                prompt = None if prompt is None else as_messages(prompt, columns.prompt, "user")
            rows.append((item_of(row, prompt, origin, columns), row))
        except UnusableRow as problem:
            problems.add_text(str(problem), origin)
    scored, without_number = _numbers(rows, columns)
    if not any(columns.prediction in row for _, row in rows):
        details = [f"{path}: {line}" for line in problems.summary()]
        details += [
            f"{path}: {count} rows without a number in {name}"
            for name, count in without_number.items()
            if count and (metrics is None or name in metrics)
        ]
        if (items := len({item for item, _ in rows})) < len(rows):
            details.append(
                f"{path}: {len(rows)} rows are of {items} items; the score of an item is the mean of its rows"
            )
        return Run(path, scored, {}, None, details)
    predictions = read_predictions(path, columns)
    scores = dict(scored) if metrics is not None else {}
    computed: dict[str, Callable[[Sequence[Prediction]], MetricResult]]
    computed = {"exact": exact_match, "bleu": partial(corpus_metric, "bleu"), "chrf": partial(corpus_metric, "chrf")}
    for name, measure in computed.items() if any(row.reference is not None for row in predictions.rows) else ():
        if (metrics is None or name in metrics) and name not in scores:
            scores[name] = measure(predictions.rows)
    dropped = [f"{path}: {line}" for line in predictions.warnings()]
    return Run(path, scores, predictions.digests(), None, dropped)


def _numbers(
    rows: Sequence[tuple[str, dict[str, Any]]], columns: PredictionColumns
) -> tuple[dict[str, MetricResult], dict[str, int]]:
    """The numeric and boolean columns of (item, row) pairs, and the number of rows with null or NaN in each."""
    names = [
        name
        for name in dict.fromkeys(name for _, row in rows for name in row)
        if name not in (columns.id, *_NO_SCORES) and any(_is_number(row.get(name)) for _, row in rows)
    ]
    metrics, lost = {}, {}
    for name in names:
        values = [(item, float(row[name])) for item, row in rows if _is_number(row.get(name))]
        lost[name] = len(rows) - len(values)
        metrics[name] = MetricResult(name, item_means(None, values), texts=len(values))
    return metrics, lost


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) and math.isfinite(value)
