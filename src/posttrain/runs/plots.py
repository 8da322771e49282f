"""PNG plots of a run from its metrics.jsonl. A plot without data is not drawn."""

import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from posttrain.runs.directory import RunDirectory
from posttrain.runs.files import storage_errors, write_atomically
from posttrain.runs.metrics import read_metrics
from posttrain.runs.panels import PANELS, TITLES, Line, Panel, Series, domain_panels, limits_of, series_of

# Okabe and Ito's palette can be told apart with any kind of colour vision; yellow is left out, it is faint on white.
BLUE, ORANGE, GREEN, RED, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
GREY = "#6E6E6E"
PHASES = {
    "rollout": BLUE,
    "rows": RED,
    "credit": SKY,
    "update": ORANGE,
    "evaluation": GREEN,
    "checkpoint": PURPLE,
}
MOST_BARS = 40
SMOOTHED_STEPS = 10

_STYLE: dict[Any, Any] = {
    "figure.dpi": 150,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "legend.framealpha": 0.7,
    "legend.edgecolor": "none",
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
}

_OUTSIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.2}


def draw_plots(run: RunDirectory) -> list[Path]:
    """Draw every plot that the run has data for into `run.plots`; returns the PNG files in the order of a report.

    Raises `RunError` when the metrics are damaged or the disk refuses.
    """
    lines = read_metrics(run.metrics)
    with storage_errors(run.plots):
        run.plots.mkdir(exist_ok=True)
    drawn = []
    with matplotlib.rc_context(_STYLE):
        for name, title in TITLES.items():
            figure = _figure(name, lines)
            if figure is None:
                continue
            figure.suptitle(f"{title} · {run.path.resolve().name}", x=0.012, ha="left", fontweight="bold", fontsize=12)
            content = io.BytesIO()
            figure.savefig(content, format="png")
            path = run.plots / f"{name}.png"
            write_atomically(path, content.getvalue())
            drawn.append(path)
    return drawn


def _figure(name: str, lines: list[Line]) -> Figure | None:
    if name == "learning_curve":
        return _learning_curve(lines)
    if name == "time":
        return _time(lines)
    return _panels(lines, domain_panels(lines) if name == "domains" else PANELS[name])


def _learning_curve(lines: list[Line]) -> Figure | None:
    held_out = series_of(lines, "success", "evaluation")
    training = series_of(lines, "rollout/success", "train")
    if not any(series and series.values for series in (held_out, training)):
        return None
    figure, (axes,) = _axes(1)
    axes.set_title(
        "on held-out seeds, 95% interval shaded" if held_out else "training episodes only: no evaluation yet"
    )
    if training is not None:
        many = len(training.steps) > 2 * SMOOTHED_STEPS
        style: dict[str, Any] = {"alpha": 0.3 if held_out else 0.9, "linewidth": 1.0, "marker": "" if many else "o"}
        axes.plot(training.steps, training.values, color=ORANGE, label="training episodes", **style)
        if many:
            label = f"training, mean of {SMOOTHED_STEPS} steps"
            axes.plot(training.steps, _smoothed(training.values), color=ORANGE, linewidth=1.4, label=label)
    if held_out is not None:
        _band(axes, lines, "success", BLUE)
        axes.plot(held_out.steps, held_out.values, color=BLUE, marker="o", label="held-out seeds", zorder=4)
    _baselines(axes, lines)
    axes.set_ylim(-0.03, 1.05)
    _finish(axes, "success", percent=True)
    axes.legend(**_OUTSIDE)
    return figure


def _band(axes: Axes, lines: list[Line], key: str, color: str) -> None:
    """The 95% interval of the held-out metric `key`, where it has one."""
    rows = limits_of(lines, key)
    if not rows:
        return
    steps, low, middle, high = (list(column) for column in zip(*rows, strict=True))
    axes.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0)
    if len(rows) <= 12:
        # A band over one point has no area; few points bear bars as well.
        below = [max(0.0, m - bound) for m, bound in zip(middle, low, strict=True)]
        above = [max(0.0, bound - m) for m, bound in zip(middle, high, strict=True)]
        axes.errorbar(steps, middle, [below, above], fmt="none", ecolor=color, elinewidth=1.0, capsize=3, alpha=0.7)


def _baselines(axes: Axes, lines: list[Line]) -> None:
    """Reference players dashed, the policy before training dotted, and the final result as a star at its step."""
    latest = {
        line["player"]: line["success"]
        for line in lines
        if line["kind"] == "baseline" and line.get("success") is not None
    }
    references, rest = {"optimal": GREEN, "random": RED}, itertools.cycle((GREY, PURPLE))
    for player in sorted(latest, key=lambda player: -latest[player]):
        success, is_reference = latest[player], player in references
        label = f"{player} policy, {success:.1%}" if is_reference else f"{player}, {success:.1%}"
        color = references[player] if is_reference else next(rest)
        axes.axhline(
            success, color=color, linestyle="--" if is_reference else ":", linewidth=1.5, label=label, zorder=2
        )
    for line in lines:
        if line["kind"] == "final" and "best_step" in line and line.get("success") is not None:
            low, high = (line.get(key) for key in ("success_low", "success_high"))
            bars = (
                None
                if low is None or high is None
                else [[max(0.0, line["success"] - low)], [max(0.0, high - line["success"])]]
            )
            look: dict[str, Any] = {"color": "black", "markersize": 11, "capsize": 3, "elinewidth": 1.0, "zorder": 6}
            label = f"result on the final seeds, {line['success']:.1%}"
            axes.errorbar([line["best_step"]], [line["success"]], bars, fmt="*", label=label, **look)


def _panels(lines: list[Line], panels: list[Panel]) -> Figure | None:
    filled = []
    for panel in panels:
        found = {key: series_of(lines, key) for key in panel.metrics}
        present = {key: series for key, series in found.items() if series is not None}
        if present:
            filled.append((panel, present))
    if not filled:
        return None
    figure, all_axes = _axes(len(filled))
    for axes, (panel, present) in zip(all_axes, filled, strict=True):
        axes.set_title(panel.title)
        for color, (key, series) in zip((BLUE, ORANGE, GREEN, PURPLE, RED, SKY), present.items(), strict=False):
            marker = "o" if len(series.steps) <= 40 else ""
            axes.plot(series.steps, series.values, color=color, marker=marker, label=panel.metrics[key])
            _band(axes, lines, key, color)
        _scale(axes, [value for series in present.values() for value in series.values], panel.logarithmic)
        _mark_nonfinite(axes, present)
        _finish(axes, panel.unit, panel.percent)
        axes.legend(loc="best")
    return figure


def _scale(axes: Axes, values: list[float], logarithmic: bool) -> None:
    """A logarithmic axis where the values span a factor of 20, else one that shows zero if no value is below it."""
    if not values:
        axes.set_yticks([])
    elif logarithmic and min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
    elif min(values) >= 0:
        axes.set_ylim(0, 1.1 * max(values) or 1)


def _mark_nonfinite(axes: Axes, present: dict[str, Series]) -> None:
    steps = sorted({step for series in present.values() for step in series.nonfinite})
    if steps:
        place: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 5}
        axes.plot(steps, [0.0] * len(steps), "x", color=RED, markersize=7, label="NaN or infinite", **place)


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
    centres = [_average([row["step"] for row in rows[start : start + per_bar]]) for start in starts]
    gaps = [b - a for a, b in itertools.pairwise(centres)]
    width = 0.85 * min(gaps, default=per_bar)
    figure, (axes,) = _axes(1)
    axes.set_title(f"each bar is the mean of {per_bar} steps" if per_bar > 1 else "each bar is one step")
    bottom = [0.0] * len(centres)
    for phase, values in seconds.items():
        if sum(values) <= 0.001 * total:
            continue
        heights = [_average(values[start : start + per_bar]) for start in starts]
        label = f"{phase}, {sum(values) / total:.0%}"
        axes.bar(centres, heights, width, bottom, color=PHASES.get(phase, "#C4C4C4"), label=label, linewidth=0)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.grid(visible=False, axis="x")
    _finish(axes, "seconds per step")
    axes.legend(**_OUTSIDE)
    if len(centres) == 1:
        axes.set_xlim(centres[0] - 3, centres[0] + 3)
    return figure


def _smoothed(values: Sequence[float]) -> list[float]:
    return [_average(values[max(0, end - SMOOTHED_STEPS) : end]) for end in range(1, len(values) + 1)]


def _average(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _axes(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(8, 4.6) if count == 1 else (8, 2.6 * count + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(count, 1, squeeze=False, sharex=True)[:, 0])


def _finish(axes: Axes, unit: str, percent: bool = False) -> None:
    axes.set_ylabel(unit)
    place = axes.get_subplotspec()
    if place is None or place.is_last_row():
        axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
