"""Reads runs and TensorBoard logs for a comparison, and computes means over seeds."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from posttrain.errors import InputError, PosttrainError
from posttrain.plugins import require_module
from posttrain.recipe.rollout import SCORES, return_source
from posttrain.recipe.run import LOGGED_IN
from posttrain.runs.directory import RunDirectory
from posttrain.runs.evaluated import checkpoint_of
from posttrain.runs.intervals import FEWEST_SEEDS, seed_mean
from posttrain.runs.log import Line, Log, read_log
from posttrain.runs.panels import MOST_POINTS, MetricLook, Series, keys_of, known_metrics, metric_of
from posttrain.runs.tables import Interval, Table, interval_of, read_run_results, score_cell, score_keys

_NOT_DRAWN = ("baseline", "final", "warning")
"""Kinds of lines whose text fields, such as the name of the policy, are missing in an event file."""


def event_directories(path: Path) -> list[Path]:
    """One path per run in TensorBoard's sense: the file `path`, or every directory below `path` that has event files."""
    if path.is_file():
        return [path]
    return sorted({file.parent for file in path.rglob("*tfevents*") if file.is_file()})


def read_events(path: Path) -> Log:
    """The scalars of an event file, or of the event files in one directory, in order of step.

    Tags written by the `tensorboard` sink get their names in metrics.jsonl. Any other tag becomes a training metric
    under its own name. If a step occurs twice, as after a resumption, the later value wins. Raises `InputError` if
    tensorboard is not installed or `path` has no scalars.
    """
    purpose = f"{path}: an event file"
    accumulator = require_module("tensorboard.backend.event_processing.event_accumulator", purpose)
    tensor_util = require_module("tensorboard.util.tensor_util", purpose)
    everything = {"scalars": 0, "tensors": 0, "images": 1, "audio": 1, "histograms": 1}
    events = accumulator.EventAccumulator(str(path), size_guidance=everything)
    try:
        events.Reload()
    except Exception as error:  # the readers of event files raise exceptions of any type
        raise InputError(f"{path} cannot be read as event files ({error}); give TensorBoard event files") from error
    tags = events.Tags()
    scalars = {tag: {point.step: float(point.value) for point in events.Scalars(tag)} for tag in tags["scalars"]}
    for tag in tags["tensors"]:
        # TensorFlow 2 writes scalars as 0-dimensional tensors.
        points = {point.step: tensor_util.make_ndarray(point.tensor_proto) for point in events.Tensors(tag)}
        scalars[tag] = {s: float(v) for s, v in points.items() if v.shape == () and v.dtype.kind in "fiu"}
    values = {tag: points for tag, points in scalars.items() if points}
    if not values:
        raise InputError(
            f"{path} has no scalars; give a TensorBoard event file (its name contains `tfevents`), a directory of "
            "event files, or the directory of a posttrain run"
        )
    from_sink = all(tag.partition("/")[0] in ("train", "evaluation", *_NOT_DRAWN) for tag in values)
    lines: dict[tuple[str, int], Line] = {}
    for tag, points in values.items():
        kind, key = tag.split("/", 1) if from_sink else ("train", tag)
        if kind in _NOT_DRAWN:
            continue
        for step, value in points.items():
            line = lines.setdefault((kind, step), {"step": step, "kind": kind})
            line[key] = value if math.isfinite(value) else None
            if line[key] is None:
                line.setdefault("nonfinite", []).append(key)
    return Log(lines[key] for key in sorted(lines, key=lambda key: (key[1], key[0])))


@dataclass(frozen=True)
class Source:
    """One run, or one TensorBoard log."""

    name: str
    """Unique among the sources of a figure."""
    path: Path
    lines: Sequence[Line]
    """Its log (`Log`)."""
    recipe: Mapping[str, Any] | None = None
    """Content of recipe.yaml, not validated because an older version may have written it; None if unknown."""
    run: RunDirectory | None = None
    """None for a TensorBoard log."""

    @property
    def stage(self) -> str | None:
        return None if self.recipe is None or "stage" not in self.recipe else str(self.recipe["stage"])

    @property
    def seed(self) -> int | None:
        seed = (self.recipe or {}).get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def model(self) -> str:
        """The `model.path` of its recipe; empty if unknown."""
        model = (self.recipe or {}).get("model")
        return str(model.get("path")) if isinstance(model, Mapping) else ""

    @property
    def final(self) -> Mapping[str, Any]:
        """The last `final` line; empty without one."""
        return next((line for line in reversed(self.lines) if line["kind"] == "final"), {})

    @property
    def steps(self) -> int:
        """The last training step logged so far."""
        return Log.of(self.lines).last_step

    @property
    def unfinished(self) -> str | None:
        """Progress of an unfinished run, such as `3 of 60 steps`; None for a finished run or if unknown."""
        steps = None if self.recipe is None else self.recipe.get("steps")
        return f"{self.steps} of {steps} steps" if isinstance(steps, int) and not self.final else None


def open_sources(paths: Sequence[Path]) -> list[Source]:
    """Open every run and log in `paths`; a directory of logs may hold several.

    Raises `InputError` for a path that is neither, or that is given twice; `RunError` for damaged metrics.
    """
    return [_open(path, name) for path, name in _named(paths)]


def readable_sources(paths: Sequence[Path]) -> tuple[list[Source], list[str]]:
    """As `open_sources` without what cannot be read, and a sentence about each of these. Raises the first if all are."""
    sources, errors = list[Source](), list[PosttrainError]()
    for path, name in _named(paths):
        try:
            sources.append(_open(path, name))
        except PosttrainError as error:
            errors.append(error)
    if errors and not sources:
        raise errors[0]
    return sources, [f"left out: {error}" for error in errors]


def _named(paths: Sequence[Path]) -> list[tuple[Path, str]]:
    """The runs and logs in `paths`, and their names. InputError for one that is given twice.

    A name is the shortest suffix of the path, in whole components and the same number for all, that makes the names unique.
    """
    expanded: list[Path] = []
    for path in paths:
        expanded += [path] if _may_be_run(path) else event_directories(path) or [path]
    absolute = [path.resolve() for path in expanded]
    for path, resolved in zip(expanded, absolute, strict=True):
        if absolute.count(resolved) > 1:
            raise InputError(f"{path} is given twice; give every run once")
    names: list[str] = []
    for parts in range(1, max((len(path.parts) for path in absolute), default=0) + 1):
        names = ["/".join(path.parts[-parts:]) for path in absolute]
        if len(set(names)) == len(names):
            break
    return list(zip(expanded, names, strict=True))


def _may_be_run(path: Path) -> bool:
    return (path / "recipe.yaml").is_file() or (path / "environment.json").is_file()


def _open(path: Path, name: str) -> Source:
    if path.is_file() or (not _may_be_run(path) and event_directories(path)):
        return Source(name, path, read_events(path))
    run, recipe = RunDirectory.open(path), None
    with suppress(InputError):
        recipe = run.recipe_values()
    return Source(name, path, read_log(run.metrics), recipe, run)


PER_RUN_KEYS = ("seed", "name", *LOGGED_IN)
"""Recipe keys in which the runs of a bundle may differ."""


@dataclass(frozen=True)
class Bundle:
    """The runs behind one curve: one recipe with several seeds, or a single run."""

    label: str
    sources: tuple[Source, ...]

    @property
    def title(self) -> str:
        """The label in a legend, with the number of seeds of a mean."""
        return self.label if len(self.sources) == 1 else f"{self.label}, mean of n = {len(self.sources)} seeds"


def bundles_of(sources: Sequence[Source]) -> tuple[list[Bundle], list[str]]:
    """Group runs by recipe, in order of each recipe's first run; returns the bundles and warnings for the user.

    Runs that share both recipe and seed are not a sample over seeds, so each of them gets its own bundle.
    """
    by_recipe: dict[str, list[Source]] = {}
    for number, source in enumerate(sources):
        shared = None if source.recipe is None else {k: v for k, v in source.recipe.items() if k not in PER_RUN_KEYS}
        key = f"run {number}" if shared is None else json.dumps(shared, sort_keys=True, default=str)
        by_recipe.setdefault(key, []).append(source)
    bundles: list[Bundle] = []
    warnings = []
    for runs in by_recipe.values():
        seeds = {source.seed for source in runs}
        if len(runs) > 1 and len(seeds) == len(runs) and None not in seeds:
            label = common_name([source.name for source in runs])
            taken = label in {bundle.label for bundle in bundles}
            bundles.append(Bundle(runs[0].name if taken else label, tuple(runs)))
            if len({source.steps for source in runs}) > 1:
                progress = ", ".join(f"{source.name} {source.steps}" for source in runs)
                warnings.append(f"the mean over seeds covers the steps that all runs have; steps so far: {progress}")
            continue
        if len(runs) > 1:
            names = " and ".join(source.name for source in runs)
            warnings.append(f"{names} have the same recipe and seed, so they are not averaged over seeds")
        bundles += [Bundle(source.name, (source,)) for source in runs]
    return bundles, warnings


def mean_over_seeds(
    series: Sequence[Series], geometric: bool = False, rate: bool = False
) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps, and the mean over n >= 2 runs with the limits of `seed_mean` at each common step, or at `MOST_POINTS` of them.

    `geometric`: geometric mean, with the interval computed on the logarithms; all values must be positive. `rate`: the
    values are in [0, 1].
    """
    by_step = [dict(zip(one.steps, one.values, strict=True)) for one in series]
    steps = sorted(set.intersection(*(set(values) for values in by_step)))
    steps = steps[:: max(1, -(-len(steps) // MOST_POINTS))]
    columns = [[math.log(values[step]) if geometric else values[step] for values in by_step] for step in steps]
    limits = [seed_mean(column, rate).limits for column in columns]
    means, low, high = ([math.exp(one[i]) if geometric else one[i] for one in limits] for i in range(3))
    return steps, means, low, high


def common_name(names: Sequence[str]) -> str:
    """The common prefix of the names of runs with several seeds, without a trailing `seed`; the first name if it is
    empty.
    """
    common = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    shared = "".join(letters[0] for letters in common)
    if all(name == shared or name[len(shared)].isdecimal() for name in names):
        shared = shared.rstrip("0123456789")  # a digit that starts several numbers is not part of the name
    shared = shared.rstrip("-_./ ")
    for word in ("seed", "s"):
        if shared.endswith((f"-{word}", f"_{word}", f".{word}", f"/{word}")):
            shared = shared[: -len(word) - 1]
    return shared.rstrip("-_./ ") or names[0]


_MAX_LISTED = 6


def shared_metrics(bundles: Sequence[Bundle]) -> tuple[list[MetricLook], list[str]]:
    """The metrics that are drawn by default, and warnings on those left out.

    Runs of posttrain contribute the metrics of a report; other logs contribute all metrics. With several bundles, at
    least two must have the metric. With several stages, metrics that each stage defines differently are left out, and
    so are returns that different rewards gave.
    """
    per_bundle: list[set[str]] = []
    for bundle in bundles:
        per_bundle.append(set())
        for source in bundle.sources:
            keys = keys_of(source.lines)
            foreign = [key for key in keys if key != "time/run"] if source.run is None else []
            per_bundle[-1].update(known_metrics(keys) or foreign)
    present = set().union(*per_bundle)
    known = known_metrics(present)
    shown = [*known, *sorted(present.difference(known))]
    stages = {source.stage for bundle in bundles for source in bundle.sources} - {None}
    warnings = []
    differ = f"the stages ({', '.join(sorted(map(str, stages)))}) define them differently"
    single = {key for key in shown if sum(key in one for one in per_bundle) < 2}
    by_stage = {key for key in shown if key.startswith("loss/") or "/loss" in key}
    for why, remedy, left_out in (
        ("only one run has them", "; draw them with --metric", single if len(bundles) > 1 else ()),
        (differ, "", by_stage if len(stages) > 1 else ()),
        ("different rewards gave them", "; draw them with --metric", _RETURNS if returns_differ(bundles) else ()),
    ):
        if keys := [key for key in shown if key in left_out]:
            more = f" and {len(keys) - _MAX_LISTED} more" if keys[_MAX_LISTED:] else ""
            warnings.append(f"left out because {why}: {', '.join(keys[:_MAX_LISTED])}{more}{remedy}")
            shown = [key for key in shown if key not in left_out]
    return [metric_of(key) for key in shown], warnings


def differing_keys(sources: Sequence[Source]) -> Table | None:
    """Recipe keys in which the runs differ, limited to common keys if their stages differ; None if there are none."""
    flat = [_flat(source.recipe or {}) for source in sources]
    everywhere = set.intersection(*(set(keys) for keys in flat)) if flat else set()
    stages = {source.stage for source in sources}
    values = {key: [one.get(key, "–") for one in flat] for key in dict.fromkeys(key for one in flat for key in one)}
    rows = [
        (key, *row)
        for key, row in values.items()
        if (len(stages) == 1 or key in everywhere) and len(set(row)) > 1 and key not in ("name", "runs", "stage")
    ]
    if not rows:
        return None
    names = tuple(source.name for source in sources)
    note = "" if len(stages) == 1 else "Limited to keys that the recipes of all these stages have."
    return Table("Recipe keys that differ", ("key", *names), rows, note, words=("key", *names))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted key -> value as JSON."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value, ensure_ascii=False, default=str)
    return flat


# -- final results ---------------------------------------------------------------------------------------------------

RATES = ("success", "test/accuracy")
_EPISODE_METRICS = ("success", "return")
_RETURNS = {"return", "rollout/return"}
_ROW_METRICS = ("test/accuracy", "test/loss")
_MAX_NAMES = 4


def returns_differ(bundles: Sequence[Bundle]) -> bool:
    """Whether different rewards gave the returns of the runs, which are then not comparable."""
    sources = [source for bundle in bundles for source in bundle.sources]
    paid = [one for one in sources if _RETURNS.intersection(keys_of(one.lines)) or "return" in one.final]
    return len({given for source in paid if (given := _return_source(source))}) > 1


def _return_source(source: Source) -> str:
    """What gave the returns of the run, see `return_source`; empty if it is unknown."""
    if source.run is None:
        return ""
    try:
        return read_run_results(source.run.path).return_source or return_source(source.run.load_recipe())
    except PosttrainError:
        return ""


def final_results(source: Source, name_returns: bool = False) -> dict[str, Interval]:
    """Metric -> value in the last `final` line: the best checkpoint of a training run, or the evaluated model.

    `name_returns`: the key of the return is `return, WHAT GAVE IT`, for runs of which `returns_differ`.
    """
    line = source.final
    keys = [
        key for key in (*_EPISODE_METRICS, *score_keys(line), *_ROW_METRICS) if isinstance(line.get(key), (int, float))
    ]
    results = {key: interval_of(line, key) for key in keys}
    given = _return_source(source) if name_returns else ""
    return {f"return, {given}" if given and key == "return" else key: value for key, value in results.items()}


def result_table(bundles: Sequence[Bundle]) -> Table | None:
    """A table with one row per finished run and per mean over seeds; None if no run has finished."""
    rows: list[tuple[str, str, str, dict[str, Interval]]] = []
    all_ended: list[tuple[Source, dict[str, Interval]]] = []
    differ = returns_differ(bundles)
    for bundle in bundles:
        ended = [(source, results) for source in bundle.sources if (results := final_results(source, differ))]
        all_ended += ended
        for source, results in ended:
            line, evaluated = source.final, checkpoint_of(source)
            step = line.get("best_step", evaluated[1] if evaluated else "–")
            rows.append((source.name, str(step), str(line.get("n") or line.get("test/rows") or "–"), results))
        if len(ended) > 1:
            first = ended[0][1]
            common = [key for key in first if all(key in results for _, results in ended)]
            columns = {key: [results[key][0] for _, results in ended] for key in common}
            means = {key: seed_mean(column, key in RATES).limits for key, column in columns.items()}
            rows.append((f"{bundle.label}, mean of {len(ended)} seeds", "–", "–", means))
    if not rows:
        return None
    keys = list(dict.fromkeys(key for *_, results in rows for key in results))
    cells = [
        (name, step, n, *(score_cell(results.get(key), percent=key in RATES) for key in keys))
        for name, step, n, results in rows
    ]
    note = (
        f"{_data_note(all_ended)} `n` is the number of environment seeds, or of rows. Brackets: 95% intervals, for a run "
        f"over environment seeds or rows, for a mean over training seeds from {FEWEST_SEEDS} runs on."
    )
    if "test/loss" in keys and len({source.stage for bundle in bundles for source in bundle.sources} - {None}) > 1:
        note += " Losses of different stages are not comparable."
    if differ:
        note += " Returns from different rewards are not comparable, so each reward has a column."
    headings = ("run", "checkpoint", "n", *(key.removeprefix(SCORES) for key in keys))
    return Table("Final results", headings, cells, note, words=("run",))


def _data_note(ended: Sequence[tuple[Source, Mapping[str, Interval]]]) -> str:
    """A note on whether the final data also selected the checkpoint: without `data.test`, it is the validation rows."""
    reused = []
    for source, results in ended:
        data = (source.recipe or {}).get("data")
        has_test = isinstance(data, Mapping) and data.get("test")
        reused += [source.name] if any(key in _ROW_METRICS for key in results) and not has_test else []
    if not reused:
        return "Final held-out data, which selected nothing."
    only_rows = len(reused) == len(ended) and all(key in _ROW_METRICS for _, results in ended for key in results)
    names = ", ".join(reused[:_MAX_NAMES])
    more = f" and {len(reused) - _MAX_NAMES} more" if reused[_MAX_NAMES:] else ""
    return (
        f"Final held-out data. The rows of {names}{more} are validation rows, which also selected the checkpoint, "
        f"because the recipe sets no `data.test`{'' if only_rows else '; all other data selected nothing'}."
    )
