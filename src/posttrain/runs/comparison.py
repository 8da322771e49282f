"""Figures of several runs: one for each metric, a curve for each run, or for each recipe with its mean over seeds."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from posttrain.runs.averages import Bundle, mean_over_seeds
from posttrain.runs.drawing import (
    SMOOTHED_STEPS,
    STYLE,
    draw_band,
    draw_last_bars,
    finish_axes,
    mark_nonfinite,
    scale_axis,
    smoothed,
)
from posttrain.runs.figure_files import entitle
from posttrain.runs.metric_names import Metric, known_metrics, metric_of
from posttrain.runs.panels import DOMAINS, GREEN, GREY, RED, Line, Series, is_trained, keys_of, limits_of, series_of

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
    found = [line.get(key) for line in lines if line["kind"] == "baseline" and line.get("player") == player]
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
