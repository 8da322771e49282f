"""Figures of several runs: one for each metric, a curve for each run, or for each recipe with its mean over seeds."""

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy.special import stdtrit

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
from posttrain.runs.metrics import Metric, known_metrics, metric_of
from posttrain.runs.panels import DOMAINS, GREEN, GREY, RED, Line, Series, is_trained, keys_of, limits_of, series_of
from posttrain.runs.scores import Checkpoint, checkpoint_scores, overall_name, score_names
from posttrain.runs.sources import Source

_OF_ONE_RUN = ("seed", "name", "runs")
"""Recipe keys that may differ between runs of one recipe."""


@dataclass(frozen=True)
class Bundle:
    """The runs behind one curve: those of one recipe with a seed each, or a single one."""

    label: str
    sources: tuple[Source, ...]

    @property
    def title(self) -> str:
        """The label, and over how many seeds a mean is."""
        return self.label if len(self.sources) == 1 else f"{self.label}, mean of n = {len(self.sources)} seeds"


@dataclass(frozen=True)
class Averaged:
    """Means over seeds and their 95% limits, at the steps that every seed has."""

    steps: list[int]
    values: list[float]
    low: list[float]
    high: list[float]


def bundles_of(sources: Sequence[Source]) -> tuple[list[Bundle], list[str]]:
    """One bundle for each recipe, in order of the first run of each, and what to say of it.

    Runs of one recipe with the same seed are the same run again: they are no sample over seeds, so such a recipe's runs
    stand by themselves.
    """
    by_recipe: dict[str, list[Source]] = {}
    for number, source in enumerate(sources):
        own = None if source.recipe is None else {k: v for k, v in source.recipe.items() if k not in _OF_ONE_RUN}
        key = f"run {number}" if own is None else json.dumps(own, sort_keys=True, default=str)
        by_recipe.setdefault(key, []).append(source)
    bundles: list[Bundle] = []
    notes = []
    for together in by_recipe.values():
        seeds = {source.seed for source in together}
        if len(together) > 1 and len(seeds) == len(together) and None not in seeds:
            bundles.append(Bundle(_label(together, bundles), tuple(together)))
            done = [source.steps for source in together]
            if len(set(done)) > 1:
                told = ", ".join(f"{source.name} {source.steps}" for source in together)
                notes.append(f"the mean over seeds is of the steps that all have; done are: {told}")
            continue
        if len(together) > 1:
            names = " and ".join(source.name for source in together)
            notes.append(f"{names} have one recipe and share a seed, so no mean over seeds is taken of them")
        bundles += [Bundle(source.name, (source,)) for source in together]
    return bundles, notes


def mean_over_seeds(series: Sequence[Series], geometric: bool = False) -> Averaged:
    """Mean and Student's t interval over two or more runs, mean ± t(0.975, n - 1) s / sqrt(n), at each common step.

    With `geometric`, of the logarithms of values, which must be above 0, and given back as values.
    """
    by_step = [dict(zip(one.steps, one.values, strict=True)) for one in series]
    steps = sorted(set.intersection(*(set(values) for values in by_step)))
    columns = [[math.log(values[step]) if geometric else values[step] for values in by_step] for step in steps]
    limits = [t_interval(column) for column in columns]
    means, low, high = ([math.exp(one[i]) if geometric else one[i] for one in limits] for i in range(3))
    return Averaged(steps, means, low, high)


def t_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95% interval by Student's t; NaN limits for fewer than two values."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return mean, math.nan, math.nan
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = float(stdtrit(n - 1, 0.975)) * spread / math.sqrt(n)
    return mean, mean - half, mean + half


def _label(together: Sequence[Source], others: Sequence[Bundle]) -> str:
    """What the names begin with alike, without a trailing `seed`; else the first name."""
    names = [source.name for source in together]
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    shared = "".join(letters[0] for letters in alike)
    if all(name[len(shared) :][:1] in tuple("0123456789") or name == shared for name in names):
        shared = shared.rstrip("0123456789")  # a digit that two numbers begin with is no part of the name
    shared = shared.rstrip("-_./ ")
    for word in ("seed", "s"):
        if shared.endswith((f"-{word}", f"_{word}", f".{word}", f"/{word}")):
            shared = shared[: -len(word) - 1]
    label = shared.rstrip("-_./ ") or together[0].name
    return together[0].name if label in {bundle.label for bundle in others} else label


DASHES = ("-", "--", ":", "-.")
MARKERS = "o^vDsP"
MOST_CURVES = len(DOMAINS) * len(DASHES)
"""More curves than this cannot be told apart."""
_MOST_BANDS = 3
"""With more curves than this, intervals are bars at the end: bands of many curves hide each other."""
_MOST_MARKED = 40
_TITLE = 92
"""Characters of a line above a panel."""
_LISTED = 6
_WIDE = 95
"""Characters of a legend that stand side by side."""

_REFERENCE: dict[str, Any] = {"linestyle": (0, (6, 3)), "linewidth": 1.0, "zorder": 2}


@dataclass(frozen=True)
class Look:
    """Of one curve; colours come first, so that few curves differ by them alone."""

    color: str
    dash: str
    marker: str


def looks(count: int) -> list[Look]:
    """As many as there are curves."""
    return [Look(DOMAINS[i % len(DOMAINS)], DASHES[i // len(DOMAINS)], MARKERS[i % len(MARKERS)]) for i in range(count)]


def shared_metrics(bundles: Sequence[Bundle]) -> tuple[list[Metric], list[str]]:
    """The metrics that are drawn without being asked for, and what is left out.

    Of posttrain's runs those that a report shows, of other logs all. Of several curves, those that two or more have; of
    several stages, none that each stage measures in its own way.
    """
    own = [{key for source in bundle.sources for key in _usual(source.lines, source.run is None)} for bundle in bundles]
    present = set().union(*own)
    known = known_metrics(present)
    metrics = [metric_of(key) for key in [*known, *sorted(present.difference(known))]]
    stages = {source.stage for bundle in bundles for source in bundle.sources} - {None}
    notes = []
    alone = [one for one in metrics if sum(one.key in keys for keys in own) < 2]
    if len(bundles) > 1 and alone:
        notes.append(f"left out, as only one has them: {_listed(alone)}; draw any with --metric")
        metrics = [one for one in metrics if one not in alone]
    apart = [one for one in metrics if one.differs_by_stage]
    if len(stages) > 1 and apart:
        told = ", ".join(sorted(str(stage) for stage in stages))
        notes.append(f"left out, as stages ({told}) measure them in their own ways: {_listed(apart)}")
        metrics = [one for one in metrics if one not in apart]
    return metrics, notes


def draw_metric(metric: Metric, bundles: Sequence[Bundle]) -> tuple[Figure | None, list[str]]:
    """The figure of one metric, and what of it is left out; None where none of the runs has a value."""
    drawn: list[tuple[Bundle, Look, list[Series]]] = []
    notes = []
    for bundle, look in zip(bundles, looks(len(bundles)), strict=True):
        found = [series for source in bundle.sources if (series := series_of(source.lines, metric.key)) is not None]
        if not found:
            continue
        if len(found) < len(bundle.sources):
            notes.append(
                f"{metric.key}: {len(bundle.sources) - len(found)} of {bundle.title} have none, so it is left out"
            )
            continue
        drawn.append((bundle, look, found))
    if not drawn:
        return None, notes
    with matplotlib.rc_context(STYLE):
        figure, told = _drawn(metric, drawn)
    return figure, [*notes, *told]


def _drawn(metric: Metric, drawn: list[tuple[Bundle, Look, list[Series]]]) -> tuple[Figure, list[str]]:
    height = math.ceil(len(drawn) / _columns([bundle.title for bundle, _, _ in drawn]))
    figure = Figure(figsize=(8, 4.6 + 0.22 * height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    trained = all(is_trained(source.lines, metric.key) for bundle, _, _ in drawn for source in bundle.sources)
    longest = max(len(series.steps) for _, _, found in drawn for series in found)
    smooth = trained and longest > 2 * SMOOTHED_STEPS
    averaged = any(len(found) > 1 for _, _, found in drawn)
    positive = all(value > 0 for _, _, found in drawn for series in found for value in series.values)
    geometric = averaged and metric.panel.logarithmic and positive
    shown: list[float] = []
    limits: list[float] = []
    notes: list[str] = []
    for bundle, look, found in drawn:
        if len(found) > 1:
            drawn_limits = _mean(axes, bundle, look, [_smooth(one) if smooth else one for one in found], geometric)
            if not drawn_limits:
                notes.append(f"{metric.key}: the runs of {bundle.title} have no step in common, so it is left out")
            limits += drawn_limits
            continue
        (series,) = found
        shown += series.values
        _single(axes, series, look, bundle.title, smooth, faint=len(drawn) <= _MOST_BANDS)
        if not averaged and len(drawn) <= _MOST_BANDS:
            limits += draw_band(axes, bundle.sources[0].lines, metric.key, look.color)
    if not averaged and len(drawn) > _MOST_BANDS:
        rows = [(look.color, limits_of(bundle.sources[0].lines, metric.key)) for bundle, look, _ in drawn]
        limits += draw_last_bars(axes, [(color, found[-1]) for color, found in rows if found])
    references = _references(axes, metric, drawn)
    mark_nonfinite(axes, [series for _, _, found in drawn for series in found])
    scale_axis(axes, metric.panel, [*shown, *limits, *references])
    finish_axes(axes, metric.panel.unit, metric.panel.percent)
    axes.set_title(_subtitle(metric, smooth, averaged, geometric, bool(limits), len(drawn)))
    entitle(figure, metric.panel.title)
    _legend(figure, axes)
    return figure, notes


def _mean(axes: Axes, bundle: Bundle, look: Look, found: list[Series], geometric: bool) -> list[float]:
    """The mean over seeds and its interval; returns what must be in sight, nothing where no step is common."""
    mean = mean_over_seeds(found, geometric)
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


def _single(axes: Axes, series: Series, look: Look, label: str, smooth: bool, faint: bool) -> None:
    """One run: as it is, or as its moving mean, with what that is of faint behind it."""
    marker = look.marker if len(series.steps) <= _MOST_MARKED else ""
    if smooth and len(series.steps) > 4:
        if faint:
            axes.plot(series.steps, series.values, color=look.color, alpha=0.18, linewidth=0.8, label="_each step")
        series = _smooth(series)
    axes.plot(series.steps, series.values, color=look.color, linestyle=look.dash, marker=marker, label=label, zorder=3)


def _smooth(series: Series) -> Series:
    return Series(series.steps[2:-2], smoothed(series.values), series.nonfinite)


def _references(axes: Axes, metric: Metric, drawn: list[tuple[Bundle, Look, list[Series]]]) -> list[float]:
    """Random and optimal players, where every run has the same; and what a panel is always compared with."""
    sources = [source for bundle, _, _ in drawn for source in bundle.sources]
    key = metric.key.removeprefix("rollout/")
    values: list[float] = []
    for player, color in (("optimal", GREEN), ("random", RED)):
        value, *others = {_of_player(source.lines, player, key) for source in sources}
        if value is not None and not others:
            form = f"{value:.1%}" if metric.panel.percent else f"{value:.3f}"
            axes.axhline(value, color=color, label=f"{player} policy, {form}", **_REFERENCE)
            values.append(value)
    if metric.panel.reference is not None:
        value, label = metric.panel.reference
        axes.axhline(value, color=GREY, label=label, **_REFERENCE)
    return values


def _of_player(lines: list[Line], player: str, key: str) -> float | None:
    found = [line.get(key) for line in lines if line["kind"] == "baseline" and line.get("policy") == player]
    return found[-1] if found else None


def _subtitle(metric: Metric, smooth: bool, averaged: bool, geometric: bool, limits: bool, count: int) -> str:
    parts = [part for part in (metric.what, metric.key if metric.what else "") if part]
    parts += [f"moving mean of {SMOOTHED_STEPS} points"] if smooth else []
    parts += ["geometric means"] if geometric else []
    if limits and averaged:
        parts.append("95% interval over seeds shaded")
    elif limits:
        parts.append("95% interval shaded" if count <= _MOST_BANDS else "95% interval at the end")
    return textwrap.fill(" · ".join(parts), _TITLE)


def _legend(figure: Figure, axes: Axes) -> None:
    """Below the panel, in as many columns as there is room for, so that it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=_columns(labels), fontsize=9, frameon=False)


def _columns(labels: Sequence[str]) -> int:
    return max(1, min(4, len(labels), _WIDE // (max(map(len, labels), default=1) + 8)))


def _usual(lines: list[Line], foreign: bool) -> list[str]:
    keys = keys_of(lines)
    known = known_metrics(keys)
    return known if known or not foreign else [key for key in keys if key != "time/run"]


def _listed(metrics: Sequence[Metric]) -> str:
    first = ", ".join(metric.key for metric in metrics[:_LISTED])
    return first if len(metrics) <= _LISTED else f"{first} and {len(metrics) - _LISTED} more"


_MOST_NAMED = 24
"""With more points than this, only the last of each run has its step beside it."""

Runs = Sequence[tuple[str, Look, list[Checkpoint]]]


def draw_scores_of_runs(bundles: Sequence[Bundle]) -> Figure | None:
    """A row of panels for each score; None for fewer than two runs that were evaluated with scores."""
    runs = [
        (source.name, look, found)
        for bundle, look in zip(bundles, looks(len(bundles)), strict=True)
        for source in bundle.sources
        if score_names(found := checkpoint_scores(source.lines))
    ]
    names = score_names([one for *_, found in runs for one in found])
    if len(runs) < 2 or not names:
        return None
    overalls = {overall_name(source.lines) for bundle in bundles for source in bundle.sources}
    overall = f"overall {overalls.pop()}" if len(overalls) == 1 else "overall score"
    paid = sum(one.training is not None for *_, found in runs for one in found) > 1
    with matplotlib.rc_context(STYLE):
        columns = 2 if paid else 1
        figure = Figure(figsize=(8, 0.8 + 2.3 * len(names)), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(names), columns, squeeze=False, sharex="col", sharey="row")
        for name, row in zip(names, panels, strict=True):
            _panel(row[0], runs, name, training=False)
            row[0].set_ylabel(name)
            if paid:
                _panel(row[1], runs, name, training=True)
        panels[0][0].set_title(f"against the {overall}")
        panels[-1][0].set_xlabel(overall)
        if paid:
            panels[0][1].set_title("against the return of training")
            panels[-1][1].set_xlabel("mean return of training episodes")
        entitle(figure, "Scores of the evaluations; beside points their steps")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2 if len(runs) > 1 else 1, frameon=False)
    return figure


def _panel(axes: Axes, runs: Runs, name: str, training: bool) -> None:
    for label, look, checkpoints in runs:
        found = [(one.training if training else one.overall[0], one) for one in checkpoints if name in one.scores]
        points = [(place, one.scores[name][0], one.step) for place, one in found if place is not None]
        x, y = [point[0] for point in points], [point[1] for point in points]
        axes.plot(x, y, color=look.color, marker=look.marker, linestyle=":", linewidth=1.2, label=label)
        for place, height, step in points if sum(len(found) for *_, found in runs) <= _MOST_NAMED else points[-1:]:
            axes.annotate(str(step), (place, height), (3, 3), textcoords="offset points", fontsize=8, color=GREY)
    axes.margins(0.08, 0.2)
