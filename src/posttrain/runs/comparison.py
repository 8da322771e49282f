"""Runs and TensorBoard logs side by side: one figure per metric.

A curve is one run, or the mean over seeds of the runs that differ by their seed alone.
"""

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy.special import stdtrit

from posttrain.errors import InputError
from posttrain.plugins import require_module
from posttrain.recipe.run import LOGGED_IN
from posttrain.recipe.sources import read_text
from posttrain.runs.directory import RunDirectory
from posttrain.runs.figures import (
    SMOOTHED_STEPS,
    STYLE,
    draw_band,
    draw_last_bars,
    entitle,
    finish_axes,
    mark_nonfinite,
    scale_axis,
    smoothed,
)
from posttrain.runs.metrics import read_metrics
from posttrain.runs.panels import (
    DOMAINS,
    GREEN,
    GREY,
    RED,
    Line,
    Metric,
    Series,
    is_trained,
    keys_of,
    known_metrics,
    limits_of,
    metric_of,
    series_of,
)

_DRAWN = ("train", "evaluation")
"""Kinds of lines whose metrics are drawn. A sink names its tags `kind/metric`."""
_NOT_DRAWN = ("baseline", "final", "warning")
"""Kinds of lines that an event file holds without their text fields, such as the name of the policy."""


def event_directories(path: Path) -> list[Path]:
    """One path per run in TensorBoard's sense: the file `path`, or every directory below `path` that has event files."""
    if path.is_file():
        return [path]
    return sorted({file.parent for file in path.rglob("*tfevents*") if file.is_file()})


def read_events(path: Path) -> list[Line]:
    """The scalars of an event file, or of the event files in one directory, in order of step.

    Tags written by the `tensorboard` sink get their names in metrics.jsonl. Any other tag becomes a training metric
    under its own name. If a step occurs twice, as after a resumption, the later value wins. Raises `InputError` if
    tensorboard is not installed or `path` has no scalars.
    """
    values = _scalars(path)
    if not values:
        raise InputError(
            f"{path} holds no scalars; give a TensorBoard event file (its name contains `tfevents`), a directory of "
            "event files, or the directory of a posttrain run"
        )
    from_sink = all(tag.partition("/")[0] in (*_DRAWN, *_NOT_DRAWN) for tag in values)
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
    return [lines[key] for key in sorted(lines, key=lambda key: (key[1], key[0]))]


def _scalars(path: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value."""
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
    return {tag: points for tag, points in scalars.items() if points}


@dataclass(frozen=True)
class Source:
    """One run, or one TensorBoard log."""

    name: str
    """Unique among the sources of a figure."""
    path: Path
    lines: list[Line]
    recipe: Mapping[str, Any] | None = None
    """Content of recipe.yaml, not validated because an older version may have written it; None if unknown."""
    run: RunDirectory | None = None
    """None for a TensorBoard log."""

    @property
    def stage(self) -> str | None:
        return None if self.recipe is None else self.recipe.get("stage")

    @property
    def seed(self) -> int | None:
        return None if self.recipe is None else self.recipe.get("seed")

    @property
    def steps(self) -> int:
        """The last training step logged so far."""
        return max((line["step"] for line in self.lines if line["kind"] == "train"), default=0)

    @property
    def unfinished(self) -> str | None:
        """Progress of an unfinished run, such as `3 of 60 steps`; None for a finished run or if unknown."""
        steps = None if self.recipe is None else self.recipe.get("steps")
        ended = any(line["kind"] == "final" for line in self.lines)
        return f"{self.steps} of {steps} steps" if isinstance(steps, int) and not ended else None


def open_sources(paths: Sequence[Path]) -> list[Source]:
    """Open every run and log in `paths`; a directory of logs may hold several.

    Raises `InputError` for a path that is neither, or that is given twice; `RunError` for damaged metrics.
    """
    expanded: list[Path] = []
    for path in paths:
        expanded += [path] if _may_be_run(path) else event_directories(path) or [path]
    absolute = [path.resolve() for path in expanded]
    for path, resolved in zip(expanded, absolute, strict=True):
        if absolute.count(resolved) > 1:
            raise InputError(f"{path} is given twice; give every run once")
    return [_open(path, name) for path, name in zip(expanded, _names(absolute), strict=True)]


def _may_be_run(path: Path) -> bool:
    return (path / "recipe.yaml").is_file() or (path / "environment.json").is_file()


def _open(path: Path, name: str) -> Source:
    if path.is_file() or (not _may_be_run(path) and event_directories(path)):
        return Source(name, path, read_events(path))
    run = RunDirectory.open(path)
    return Source(name, path, read_metrics(run.metrics), _recipe(run), run)


def _recipe(run: RunDirectory) -> Mapping[str, Any] | None:
    try:
        return read_text(run.recipe_file.read_text(encoding="utf-8"), str(run.recipe_file)).values
    except (OSError, UnicodeDecodeError, InputError):
        return None


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest suffix of each path, in whole components and the same number for all, that makes the names unique."""
    most = max((len(path.parts) for path in paths), default=1)
    for parts in range(1, most + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names if paths else []


_PER_RUN_KEYS = ("seed", "name", *LOGGED_IN)
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


@dataclass(frozen=True)
class Averaged:
    """Means over seeds and their 95% limits, at the steps that all seeds have."""

    steps: list[int]
    values: list[float]
    low: list[float]
    high: list[float]


def bundles_of(sources: Sequence[Source]) -> tuple[list[Bundle], list[str]]:
    """Group runs by recipe, in order of each recipe's first run; returns the bundles and warnings for the user.

    Runs that share both recipe and seed are no sample over seeds, so each of them gets a bundle of its own.
    """
    by_recipe: dict[str, list[Source]] = {}
    for number, source in enumerate(sources):
        shared = None if source.recipe is None else {k: v for k, v in source.recipe.items() if k not in _PER_RUN_KEYS}
        key = f"run {number}" if shared is None else json.dumps(shared, sort_keys=True, default=str)
        by_recipe.setdefault(key, []).append(source)
    bundles: list[Bundle] = []
    warnings = []
    for runs in by_recipe.values():
        seeds = {source.seed for source in runs}
        if len(runs) > 1 and len(seeds) == len(runs) and None not in seeds:
            bundles.append(Bundle(_label(runs, bundles), tuple(runs)))
            if len({source.steps for source in runs}) > 1:
                progress = ", ".join(f"{source.name} {source.steps}" for source in runs)
                warnings.append(f"the mean over seeds covers the steps that all runs have; steps so far: {progress}")
            continue
        if len(runs) > 1:
            names = " and ".join(source.name for source in runs)
            warnings.append(f"{names} have the same recipe and seed, so they are not averaged over seeds")
        bundles += [Bundle(source.name, (source,)) for source in runs]
    return bundles, warnings


def mean_over_seeds(series: Sequence[Series], geometric: bool = False) -> Averaged:
    """Mean over n >= 2 runs with Student's t interval, mean ± t(0.975, n - 1) s / sqrt(n), at each common step.

    `geometric`: geometric mean, with the interval computed on the logarithms; all values must be positive.
    """
    by_step = [dict(zip(one.steps, one.values, strict=True)) for one in series]
    steps = sorted(set.intersection(*(set(values) for values in by_step)))
    columns = [[math.log(values[step]) if geometric else values[step] for values in by_step] for step in steps]
    limits = [t_interval(column) for column in columns]
    means, low, high = ([math.exp(one[i]) if geometric else one[i] for one in limits] for i in range(3))
    return Averaged(steps, means, low, high)


def t_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95% Student's t interval; the limits are NaN for fewer than two values."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return mean, math.nan, math.nan
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = float(stdtrit(n - 1, 0.975)) * spread / math.sqrt(n)
    return mean, mean - half, mean + half


def _label(runs: Sequence[Source], others: Sequence[Bundle]) -> str:
    """The common prefix of the names without a trailing `seed`; the first name if the label is empty or taken."""
    names = [source.name for source in runs]
    common = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    shared = "".join(letters[0] for letters in common)
    if all(name[len(shared) :][:1] in tuple("0123456789") or name == shared for name in names):
        shared = shared.rstrip("0123456789")  # a digit that starts several numbers is not part of the name
    shared = shared.rstrip("-_./ ")
    for word in ("seed", "s"):
        if shared.endswith((f"-{word}", f"_{word}", f".{word}", f"/{word}")):
            shared = shared[: -len(word) - 1]
    label = shared.rstrip("-_./ ") or runs[0].name
    return runs[0].name if label in {bundle.label for bundle in others} else label


DASHES = ("-", "--", ":", "-.")
MARKERS = "o^vDsP"
MOST_CURVES = len(DOMAINS) * len(DASHES)
"""More curves than this cannot be distinguished."""
_MOST_BANDS = 3
"""With more curves than this, intervals are bars at the last step, because many bands hide each other."""
_MOST_MARKED = 40
"""Curves with more points than this have no markers."""
_TITLE_WIDTH = 92
"""Characters per line above a panel."""
_MAX_LISTED = 6
_LEGEND_WIDTH = 95
"""Characters per row of a legend."""

_BASELINE_STYLE: dict[str, Any] = {"linestyle": (0, (6, 3)), "linewidth": 1.0, "zorder": 2}


@dataclass(frozen=True)
class Look:
    """Style of one curve. Colors vary first, so a few curves differ by color alone."""

    color: str
    dash: str
    marker: str


def looks(count: int) -> list[Look]:
    """Styles for `count` curves."""
    return [Look(DOMAINS[i % len(DOMAINS)], DASHES[i // len(DOMAINS)], MARKERS[i % len(MARKERS)]) for i in range(count)]


def shared_metrics(bundles: Sequence[Bundle]) -> tuple[list[Metric], list[str]]:
    """The metrics that are drawn by default, and warnings on those left out.

    Runs of posttrain contribute the metrics of a report, other logs all of theirs. With several bundles, at least two
    must have the metric. With several stages, metrics that each stage defines differently are left out.
    """
    per_bundle = [
        {key for source in bundle.sources for key in _default_keys(source.lines, source.run is None)}
        for bundle in bundles
    ]
    present = set().union(*per_bundle)
    known = known_metrics(present)
    metrics = [metric_of(key) for key in [*known, *sorted(present.difference(known))]]
    stages = {source.stage for bundle in bundles for source in bundle.sources} - {None}
    warnings = []
    single = [metric for metric in metrics if sum(metric.key in keys for keys in per_bundle) < 2]
    if len(bundles) > 1 and single:
        warnings.append(f"left out because only one run has them: {_listed(single)}; draw them with --metric")
        metrics = [metric for metric in metrics if metric not in single]
    differing = [metric for metric in metrics if metric.differs_by_stage]
    if len(stages) > 1 and differing:
        names = ", ".join(sorted(str(stage) for stage in stages))
        warnings.append(f"left out because the stages ({names}) define them differently: {_listed(differing)}")
        metrics = [metric for metric in metrics if metric not in differing]
    return metrics, warnings


def draw_metric(metric: Metric, bundles: Sequence[Bundle]) -> tuple[Figure | None, list[str]]:
    """The figure of one metric and warnings on what it leaves out; None if no run has a value."""
    drawn: list[tuple[Bundle, Look, list[Series]]] = []
    warnings = []
    for bundle, look in zip(bundles, looks(len(bundles)), strict=True):
        curves = [series for source in bundle.sources if (series := series_of(source.lines, metric.key)) is not None]
        if not curves:
            continue
        if len(curves) < len(bundle.sources):
            missing = len(bundle.sources) - len(curves)
            warnings.append(f"{metric.key}: {bundle.title} is left out because {missing} of its runs have no value")
            continue
        drawn.append((bundle, look, curves))
    if not drawn:
        return None, warnings
    with matplotlib.rc_context(STYLE):
        figure, more = _draw(metric, drawn)
    return figure, [*warnings, *more]


def _draw(metric: Metric, drawn: list[tuple[Bundle, Look, list[Series]]]) -> tuple[Figure, list[str]]:
    height = math.ceil(len(drawn) / _columns([bundle.title for bundle, _, _ in drawn]))
    figure = Figure(figsize=(8, 4.6 + 0.22 * height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    trained = all(is_trained(source.lines, metric.key) for bundle, _, _ in drawn for source in bundle.sources)
    longest = max(len(series.steps) for _, _, curves in drawn for series in curves)
    smooth = trained and longest > 2 * SMOOTHED_STEPS
    averaged = any(len(curves) > 1 for _, _, curves in drawn)
    positive = all(value > 0 for _, _, curves in drawn for series in curves for value in series.values)
    geometric = averaged and metric.panel.logarithmic and positive
    shown: list[float] = []
    limits: list[float] = []
    warnings: list[str] = []
    for bundle, look, curves in drawn:
        if len(curves) > 1:
            drawn_limits = _draw_mean(
                axes, bundle, look, [_smooth(one) if smooth else one for one in curves], geometric
            )
            if not drawn_limits:
                warnings.append(f"{metric.key}: {bundle.title} is left out because its runs have no step in common")
            limits += drawn_limits
            continue
        (series,) = curves
        shown += series.values
        _draw_run(axes, series, look, bundle.title, smooth, faint=len(drawn) <= _MOST_BANDS)
        if not averaged and len(drawn) <= _MOST_BANDS:
            limits += draw_band(axes, bundle.sources[0].lines, metric.key, look.color)
    if not averaged and len(drawn) > _MOST_BANDS:
        rows = [(look.color, limits_of(bundle.sources[0].lines, metric.key)) for bundle, look, _ in drawn]
        limits += draw_last_bars(axes, [(color, curves[-1]) for color, curves in rows if curves])
    baselines = _draw_baselines(axes, metric, drawn)
    mark_nonfinite(axes, [series for _, _, curves in drawn for series in curves])
    scale_axis(axes, metric.panel, [*shown, *limits, *baselines])
    finish_axes(axes, metric.panel.unit, metric.panel.percent)
    axes.set_title(_subtitle(metric, smooth, averaged, geometric, bool(limits), len(drawn)))
    entitle(figure, metric.panel.title)
    _draw_legend(figure, axes)
    return figure, warnings


def _draw_mean(axes: Axes, bundle: Bundle, look: Look, curves: list[Series], geometric: bool) -> list[float]:
    """Draw the mean over seeds and its interval; returns the values to fit on the axis, none without a common step."""
    mean = mean_over_seeds(curves, geometric)
    if not mean.steps:
        return []
    marker = look.marker if len(mean.steps) <= _MOST_MARKED else ""
    axes.plot(
        mean.steps, mean.values, color=look.color, linestyle=look.dash, marker=marker, label=bundle.title, zorder=3
    )
    if len(mean.steps) == 1:
        lengths = [[mean.values[0] - mean.low[0]], [mean.high[0] - mean.values[0]]]
        axes.errorbar(mean.steps, mean.values, lengths, fmt="none", ecolor=look.color, capsize=3)
    axes.fill_between(mean.steps, mean.low, mean.high, color=look.color, alpha=0.18, linewidth=0)
    return [*mean.values, *mean.low, *mean.high]


def _draw_run(axes: Axes, series: Series, look: Look, label: str, smooth: bool, faint: bool) -> None:
    """Draw one run, or its moving mean with the raw values faint behind it."""
    marker = look.marker if len(series.steps) <= _MOST_MARKED else ""
    if smooth and len(series.steps) > 4:
        if faint:
            axes.plot(series.steps, series.values, color=look.color, alpha=0.18, linewidth=0.8, label="_each step")
        series = _smooth(series)
    axes.plot(series.steps, series.values, color=look.color, linestyle=look.dash, marker=marker, label=label, zorder=3)


def _smooth(series: Series) -> Series:
    return Series(series.steps[2:-2], smoothed(series.values), series.nonfinite)


def _draw_baselines(axes: Axes, metric: Metric, drawn: list[tuple[Bundle, Look, list[Series]]]) -> list[float]:
    """Draw the random and the optimal policy if all runs have the same value, and the reference line of the panel."""
    sources = [source for bundle, _, _ in drawn for source in bundle.sources]
    key = metric.key.removeprefix("rollout/")
    values: list[float] = []
    for policy, color in (("optimal", GREEN), ("random", RED)):
        value, *others = {_baseline(source.lines, policy, key) for source in sources}
        if value is not None and not others:
            form = f"{value:.1%}" if metric.panel.percent else f"{value:.3f}"
            axes.axhline(value, color=color, label=f"{policy} policy, {form}", **_BASELINE_STYLE)
            values.append(value)
    if metric.panel.reference is not None:
        value, label = metric.panel.reference
        axes.axhline(value, color=GREY, label=label, **_BASELINE_STYLE)
    return values


def _baseline(lines: list[Line], policy: str, key: str) -> float | None:
    values = [line.get(key) for line in lines if line["kind"] == "baseline" and line.get("policy") == policy]
    return values[-1] if values else None


def _subtitle(metric: Metric, smooth: bool, averaged: bool, geometric: bool, limits: bool, count: int) -> str:
    parts = [part for part in (metric.what, metric.key if metric.what else "") if part]
    parts += [f"moving mean of {SMOOTHED_STEPS} points"] if smooth else []
    parts += ["geometric means"] if geometric else []
    if limits and averaged:
        parts.append("95% interval over seeds shaded")
    elif limits:
        parts.append("95% interval shaded" if count <= _MOST_BANDS else "95% interval at the end")
    return textwrap.fill(" · ".join(parts), _TITLE_WIDTH)


def _draw_legend(figure: Figure, axes: Axes) -> None:
    """Place the legend below the panel, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=_columns(labels), fontsize=9, frameon=False)


def _columns(labels: Sequence[str]) -> int:
    return max(1, min(4, len(labels), _LEGEND_WIDTH // (max(map(len, labels), default=1) + 8)))


def _default_keys(lines: list[Line], foreign: bool) -> list[str]:
    keys = keys_of(lines)
    known = known_metrics(keys)
    return known if known or not foreign else [key for key in keys if key != "time/run"]


def _listed(metrics: Sequence[Metric]) -> str:
    first = ", ".join(metric.key for metric in metrics[:_MAX_LISTED])
    return first if len(metrics) <= _MAX_LISTED else f"{first} and {len(metrics) - _MAX_LISTED} more"
