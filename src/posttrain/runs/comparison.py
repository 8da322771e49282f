"""Runs and TensorBoard logs side by side: one figure per metric.

A curve is one run, or the mean over seeds of runs that differ only by their seed.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

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
from posttrain.runs.intervals import FEWEST_SEEDS
from posttrain.runs.panels import (
    DOMAINS,
    GREEN,
    GREY,
    RED,
    Line,
    MetricLook,
    Series,
    is_trained,
    limits_of,
    series_of,
)
from posttrain.runs.sources import Averaged, Bundle, mean_over_seeds

DASHES = ("-", "--", ":", "-.")
MARKERS = "o^vDsP"
MOST_CURVES = len(DOMAINS) * len(DASHES)
"""Maximum number of curves that can be distinguished."""
_MOST_BANDS = 3
"""With more curves than this, intervals are bars at the last step, because many bands hide each other."""
_MOST_MARKED = 40
"""Curves with more points than this have no markers."""
_TITLE_WIDTH = 92
"""Maximum number of characters per line above a panel."""
_LEGEND_WIDTH = 95
"""Maximum number of characters per row of a legend."""

_BASELINE_STYLE: dict[str, Any] = {"linestyle": (0, (6, 3)), "linewidth": 1.0, "zorder": 2}


@dataclass(frozen=True)
class Look:
    """Style of one curve. Colors vary first, so a few curves differ only by color."""

    color: str
    dash: str
    marker: str


def looks(count: int) -> list[Look]:
    """Styles for `count` curves."""
    return [Look(DOMAINS[i % len(DOMAINS)], DASHES[i // len(DOMAINS)], MARKERS[i % len(MARKERS)]) for i in range(count)]


def draw_metric(metric: MetricLook, bundles: Sequence[Bundle]) -> tuple[Figure | None, list[str]]:
    """The figure of one metric, and warnings about omitted runs; None if no run has a value."""
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


def _draw(metric: MetricLook, drawn: list[tuple[Bundle, Look, list[Series]]]) -> tuple[Figure, list[str]]:
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
            smoothed = [_smooth(one) if smooth else one for one in curves]
            drawn_limits = _draw_mean(axes, bundle, look, mean_over_seeds(smoothed, geometric, metric.panel.percent))
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


def _draw_mean(axes: Axes, bundle: Bundle, look: Look, mean: Averaged) -> list[float]:
    """Draw the mean over seeds and its interval; returns the values to fit on the axis, none without a common step."""
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
    return [value for value in (*mean.values, *mean.low, *mean.high) if not math.isnan(value)]


def _draw_run(axes: Axes, series: Series, look: Look, label: str, smooth: bool, faint: bool) -> None:
    """Draw one run, or its moving mean over faint raw values."""
    marker = look.marker if len(series.steps) <= _MOST_MARKED else ""
    if smooth and len(series.steps) > 4:
        if faint:
            axes.plot(series.steps, series.values, color=look.color, alpha=0.18, linewidth=0.8, label="_each step")
        series = _smooth(series)
    axes.plot(series.steps, series.values, color=look.color, linestyle=look.dash, marker=marker, label=label, zorder=3)


def _smooth(series: Series) -> Series:
    return Series(series.steps[2:-2], smoothed(series.values), series.nonfinite)


def _draw_baselines(axes: Axes, metric: MetricLook, drawn: list[tuple[Bundle, Look, list[Series]]]) -> list[float]:
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


def _subtitle(metric: MetricLook, smooth: bool, averaged: bool, geometric: bool, limits: bool, count: int) -> str:
    parts = [part for part in (metric.what, metric.key if metric.what else "") if part]
    parts += [f"moving mean of {SMOOTHED_STEPS} points"] if smooth else []
    parts += ["geometric means"] if geometric else []
    if limits and averaged:
        parts.append(f"95% interval over seeds shaded, from {FEWEST_SEEDS} seeds on")
    elif limits:
        parts.append("95% interval shaded" if count <= _MOST_BANDS else "95% interval at the end")
    return textwrap.fill(" · ".join(parts), _TITLE_WIDTH)


def _draw_legend(figure: Figure, axes: Axes) -> None:
    """Place the legend below the panel, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=_columns(labels), fontsize=9, frameon=False)


def _columns(labels: Sequence[str]) -> int:
    return max(1, min(4, len(labels), _LEGEND_WIDTH // (max(map(len, labels), default=1) + 8)))
