"""Plots of a run from its metrics.jsonl. A plot without data is not drawn."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from posttrain.runs.directory import RunDirectory
from posttrain.runs.drawing import (
    OUTSIDE,
    STYLE,
    average,
    draw_band,
    draw_last_bars,
    draw_references,
    draw_result,
    draw_training,
    finish_axes,
    mark_nonfinite,
    new_figure,
    scale_axis,
)
from posttrain.runs.figure_files import Format, entitle, save
from posttrain.runs.metrics import read_metrics
from posttrain.runs.panels import (
    BLUE,
    GREEN,
    GREY,
    HELD_OUT,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    TITLES,
    TRAINING,
    Curve,
    Line,
    Panel,
    Series,
    limits_of,
    panels_of,
    series_of,
)
from posttrain.runs.score_plot import draw_scores

PHASES = {
    "rollout": BLUE,
    "waited_for_rollout": BLUE,
    "rows": RED,
    "credit": SKY,
    "update": ORANGE,
    "evaluation": GREEN,
    "checkpoint": PURPLE,
}
MOST_BARS = 40
_FINAL = {"validation/loss": ("test/loss", "{:.4f}"), "validation/accuracy": ("test/accuracy", "{:.1%}")}
"""Held-out metric of rows -> the metric of the final table that belongs beside it, and how it is written."""


def draw_plots(run: RunDirectory, out: Path | None = None, forms: Sequence[Format] = ("png",)) -> list[Path]:
    """Draw every plot that the run has data for; returns the files in the order of a report.

    They are written to `out`, or to `run.plots` without it, in each of `forms`. Raises `RunError` when the metrics are
    damaged or the disk refuses.
    """
    found = figures(run.path.resolve().name, read_metrics(run.metrics))
    return [path for name, figure in found for path in save(figure, out or run.plots, name, forms)]


def figures(title: str, lines: list[Line]) -> list[tuple[str, Figure]]:
    """(name in `TITLES`, figure) of every plot that there is data for, with `title` after its own."""
    found = []
    with matplotlib.rc_context(STYLE):
        for name, own in TITLES.items():
            figure = draw_figure(name, lines)
            if figure is not None:
                entitle(figure, f"{own} · {title}")
                found.append((name, figure))
    return found


def draw_figure(name: str, lines: list[Line]) -> Figure | None:
    """The figure of this name in `TITLES`, without its title; None where the run has no data for it."""
    if name == "learning_curve":
        return _learning_curve(lines)
    if name == "scores":
        return draw_scores(lines)
    return _time(lines) if name == "time" else _panels(lines, panels_of(name, lines))


def _learning_curve(lines: list[Line]) -> Figure | None:
    """Success on held-out seeds, or the mean return where the environment knows no success."""
    is_rate = any(series_of(lines, key) is not None for key in ("success", "rollout/success"))
    key, unit, form = ("success", "success", "{:.1%}") if is_rate else ("return", "mean return", "{:.3f}")
    held_out, training = series_of(lines, key), series_of(lines, f"rollout/{key}")
    if not any(series and series.values for series in (held_out, training)):
        return None
    figure, (axes,) = new_figure(1)
    shown: list[float] = []
    if training is not None:
        draw_training(axes, training, "training episodes", TRAINING, strength=0.3 if held_out else 0.9)
        shown += training.values
    limits = []
    if held_out is not None:
        limits = draw_band(axes, lines, key, HELD_OUT)
        axes.plot(held_out.steps, held_out.values, color=HELD_OUT, marker="o", label="held-out seeds", zorder=4)
        shown += held_out.values
    interval = ", 95% interval shaded; straight lines are of the final seeds" if limits else ""
    axes.set_title(
        f"{unit} on held-out seeds{interval}" if held_out else f"{unit}, training episodes only: no evaluation yet"
    )
    shown += draw_references(axes, lines, key, form)
    shown += draw_result(axes, lines, key, "result on the final seeds", form)
    scale_axis(axes, Panel("", "", (), whole=is_rate, from_zero=False), [*shown, *limits])
    finish_axes(axes, unit, percent=is_rate)
    axes.legend(**OUTSIDE)
    return figure


def _panels(lines: list[Line], panels: list[Panel]) -> Figure | None:
    filled = []
    for panel in panels:
        present = [(curve, series) for curve in panel.curves if (series := series_of(lines, curve.key)) is not None]
        if present:
            filled.append((panel, present))
    if not filled:
        return None
    figure, all_axes = new_figure(len(filled))
    for axes, (panel, present) in zip(all_axes, filled, strict=True):
        _fill(axes, lines, panel, present)
    return figure


def _fill(axes: Axes, lines: list[Line], panel: Panel, present: list[tuple[Curve, Series]]) -> None:
    shown: list[float] = []
    limits: list[float] = []
    for curve, series in present:
        shown += series.values
        if panel.smoothed and curve.key.startswith(("loss/", "preference/", "policy/", "rollout/")):
            draw_training(axes, series, curve.label, curve.color)
        else:
            marker = "o" if len(series.steps) <= 40 else ""
            axes.plot(series.steps, series.values, color=curve.color, marker=marker, label=curve.label, zorder=3)
        if not panel.compared:
            limits += draw_band(axes, lines, curve.key, curve.color)
        if curve.key in _FINAL:
            key, form = _FINAL[curve.key]
            shown += draw_result(axes, lines, key, "result on the final rows", form)
    if panel.compared:
        found = [(curve.color, limits_of(lines, curve.key)) for curve, _ in present]
        limits = draw_last_bars(axes, [(color, rows[-1]) for color, rows in found if rows])
    if panel.reference is not None:
        value, label = panel.reference
        axes.axhline(value, color=GREY, linestyle="--", linewidth=1.2, label=label, zorder=2)
    told = "95% interval at the end" if panel.compared else "95% interval shaded"
    axes.set_title(f"{panel.title}, {told}" if limits else panel.title)
    scale_axis(axes, panel, [*shown, *limits])
    mark_nonfinite(axes, [series for _, series in present])
    finish_axes(axes, panel.unit, panel.percent)
    axes.legend(loc="best")


def _time(lines: list[Line]) -> Figure | None:
    rows = [line for line in lines if line["kind"] == "train" and any(line.get(f"time/{phase}") for phase in PHASES)]
    if not rows:
        return None
    seconds = {phase: [line.get(f"time/{phase}") or 0.0 for line in rows] for phase in PHASES}
    known = [sum(values) for values in zip(*seconds.values(), strict=True)]
    # Time that no phase accounts for is shown, so that the bars are as tall as a step is long.
    seconds["other"] = [max(0.0, (line.get("time/step") or 0.0) - told) for line, told in zip(rows, known, strict=True)]
    total = sum(sum(values) for values in seconds.values())
    per_bar = math.ceil(len(rows) / MOST_BARS)
    starts = range(0, len(rows), per_bar)
    centres = [average([row["step"] for row in rows[start : start + per_bar]]) for start in starts]
    gaps = [b - a for a, b in itertools.pairwise(centres)]
    width = 0.85 * min(gaps, default=per_bar)
    figure, (axes,) = new_figure(1)
    axes.set_title(f"each bar is the mean of {per_bar} steps" if per_bar > 1 else "each bar is one step")
    bottom = [0.0] * len(centres)
    for phase, values in seconds.items():
        if sum(values) <= 0.001 * total:
            continue
        heights = [average(values[start : start + per_bar]) for start in starts]
        label = f"{phase.replace('_', ' ')}, {sum(values) / total:.0%}"
        axes.bar(centres, heights, width, bottom, color=PHASES.get(phase, "#C4C4C4"), label=label, linewidth=0)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.grid(visible=False, axis="x")
    finish_axes(axes, "seconds per step")
    axes.legend(**OUTSIDE)
    if len(centres) == 1:
        axes.set_xlim(centres[0] - 3, centres[0] + 3)
    return figure
