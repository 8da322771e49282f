"""Drawing primitives: axes, curves with their 95% intervals, baselines, and image files."""

import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, PercentFormatter

from posttrain.runs.directory import storage_errors, write_atomically
from posttrain.runs.panels import (
    BLUE,
    GREEN,
    GREY,
    MOST_POINTS,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    Line,
    Panel,
    Series,
    limits_of,
)
from posttrain.terminal import printable

SMOOTHED_STEPS = 11
"""Window of the moving mean in steps; odd, so that the window is centered."""
MOST_BARS = 12
"""Bands with more points than this have no bars at the points."""

STYLE: dict[Any, Any] = {
    "figure.dpi": 150,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.formatter.limits": (-8, 8),  # a power of ten above the axis would push the title away
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "legend.framealpha": 0.7,
    "legend.edgecolor": "none",
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
}
_LONGEST_OUTSIDE = 44
"""Maximum length of a label in a legend beside the axes. Longer labels would leave no width for the axes."""


def new_figure(count: int) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels in a column with a shared x axis."""
    figure = Figure(figsize=(8, 4.6) if count == 1 else (8, 2.6 * count + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(count, 1, squeeze=False, sharex=True)[:, 0])


def outside_legend(axes: Axes) -> None:
    """Put the legend to the right of the axes."""
    legend = axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2)
    for label in legend.get_texts():
        label.set_text(plain(label.get_text(), _LONGEST_OUTSIDE))


def finish_axes(axes: Axes, unit: str, percent: bool = False) -> None:
    """Label the axes, put integer ticks on the step axis, and leave out points of curves that would not be visible."""
    for curve in axes.get_lines():
        if len(steps := np.asarray(curve.get_xdata())) > MOST_POINTS:
            curve.set_data(*thinned(steps, np.asarray(curve.get_ydata())))
    axes.set_ylabel(unit)
    subplot = axes.get_subplotspec()
    if subplot is None or subplot.is_last_row():
        axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def draw_training(axes: Axes, series: Series, label: str, color: str, strength: float = 0.9) -> None:
    """Draw a curve over training steps; with many steps, its moving mean over faint raw values."""
    many = len(series.steps) > 2 * SMOOTHED_STEPS
    look: dict[str, Any] = {"alpha": 0.3 if many else strength, "linewidth": 1.0, "marker": "" if many else "o"}
    axes.plot(series.steps, series.values, color=color, label="_each step" if many else label, **look)
    if many:
        label = f"{label}, mean of {SMOOTHED_STEPS} steps"
        means = smoothed(series.values)
        axes.plot(series.steps[2:-2], means, color=color, linewidth=1.4, label=label)


def draw_band(axes: Axes, lines: list[Line], key: str, color: str) -> list[float]:
    """Shade the 95% interval of the held-out metric `key`; returns the limits, empty if it has no interval."""
    rows = limits_of(lines, key)
    if not rows:
        return []
    rows = rows[:: -(-len(rows) // MOST_POINTS)]
    steps, low, _, high = (list(column) for column in zip(*rows, strict=True))
    axes.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0)
    if len(rows) <= MOST_BARS:
        # A band over a single point has no area, so short curves also get bars.
        for step, below, value, above in rows:
            _bar(axes, step, below, value, above, color)
    return low + high


def draw_last_bars(axes: Axes, last: Sequence[tuple[str, tuple[int, float, float, float]]]) -> list[float]:
    """Draw 95% intervals, each (color, (step, low, value, high)), side by side to the right of their steps.

    Returns the limits.
    """
    span = axes.dataLim.width or 1.0
    for position, (color, (step, low, value, high)) in enumerate(last, start=1):
        _bar(axes, step + 0.012 * position * span, low, value, high, color, fmt="_", alpha=1.0)
    return [limit for _, (_, low, _, high) in last for limit in (low, high)]


def _bar(
    axes: Axes, step: float, low: float, value: float, high: float, color: str, fmt: str = "none", alpha: float = 0.7
) -> None:
    lengths = [[max(0.0, value - low)], [max(0.0, high - value)]]
    axes.errorbar([step], [value], lengths, fmt=fmt, color=color, ecolor=color, elinewidth=1.0, capsize=3, alpha=alpha)


def draw_baselines(axes: Axes, lines: list[Line], key: str, form: str) -> list[float]:
    """Draw the baseline policies as horizontal lines, random and optimal dashed, others dotted; returns their values."""
    latest = {line["policy"]: line[key] for line in lines if line["kind"] == "baseline" and line.get(key) is not None}
    bounds = {"optimal": GREEN, "random": RED}
    rest = itertools.cycle(itertools.product((":", (0, (4, 1, 1, 1))), (GREY, PURPLE, SKY, "#222222")))
    for policy in sorted(latest, key=lambda policy: -latest[policy]):
        is_bound = policy in bounds
        name = f"{policy} policy" if is_bound else policy
        line, color = ("--", bounds[policy]) if is_bound else next(rest)
        axes.axhline(
            latest[policy],
            color=color,
            linestyle=line,
            linewidth=1.5,
            label=f"{name}, {form.format(latest[policy])}",
            zorder=2,
        )
    return list(latest.values())


def draw_result(axes: Axes, lines: list[Line], key: str, what: str, form: str) -> list[float]:
    """Draw the final result with its interval as a star at its checkpoint's step; returns the values to fit on the axis."""
    shown: list[float] = []
    for line in lines:
        if line["kind"] == "final" and "best_step" in line and line.get(key) is not None:
            value, low, high = line[key], line.get(f"{key}_low"), line.get(f"{key}_high")
            bars = None if low is None or high is None else [[max(0.0, value - low)], [max(0.0, high - value)]]
            look: dict[str, Any] = {"color": "black", "markersize": 11, "capsize": 3, "elinewidth": 1.0, "zorder": 6}
            label = f"{what}, {form.format(value)}"
            axes.errorbar([line["best_step"]], [value], bars, fmt="*", label=label, **look)
            shown += [number for number in (value, low, high) if number is not None]
    return shown


def scale_axis(axes: Axes, panel: Panel, values: list[float]) -> None:
    """Choose scale and limits of the y axis so that `values` fit."""
    if panel.whole:
        axes.set_ylim(-0.03, 1.05)
    elif not values:
        axes.set_yticks([])
    elif panel.logarithmic and min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
    elif panel.from_zero and min(values) >= 0:
        axes.set_ylim(0, 1.1 * max(values) or 1)


def mark_nonfinite(axes: Axes, drawn: Sequence[Series]) -> None:
    """Draw crosses at the bottom, at the steps where a metric was NaN or infinite."""
    steps = sorted({step for series in drawn for step in series.nonfinite})
    if steps:
        look: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 5}
        axes.plot(steps, [0.0] * len(steps), "x", color=RED, markersize=7, label="NaN or infinite", **look)


def average(values: Sequence[float]) -> float:
    """The mean of `values`, which must not be empty."""
    return math.fsum(values) / len(values)


def smoothed(values: Sequence[float]) -> list[float]:
    """Centered moving mean [n - 4] over `SMOOTHED_STEPS` values, without the first two and the last two.

    The mean is centered, because a mean of past steps lags behind and makes a falling loss look too high. The window
    shrinks towards both ends, to five values.
    """
    means: list[list[float]] = [
        np.lib.stride_tricks.sliding_window_view(np.array(values), 2 * reach + 1).mean(1).tolist()
        for reach in range(2, min((len(values) - 1) // 2, SMOOTHED_STEPS // 2) + 1)
    ]
    *shorter, longest = means or [[]]
    return [*(one[0] for one in shorter), *longest, *(one[-1] for one in reversed(shorter))]


def thinned(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A curve of at most `MOST_POINTS` points, each array [n], that looks like `values`, [m] by `steps`.

    Of each of equal parts of the curve, it has the lowest and the highest point, and the first.
    """
    per_part = -(-3 * len(steps) // MOST_POINTS)
    starts = np.arange(0, len(steps), per_part)
    parts = [values[start : start + per_part] for start in starts]
    extremes = [starts + [choose(part) for part in parts] for choose in (np.argmin, np.argmax)]
    kept = np.unique(np.concatenate([starts, *extremes, [len(steps) - 1]]))
    return steps[kept], values[kept]


Format = Literal["png", "svg"]
FORMATS: tuple[Format, ...] = get_args(Format)
_SVG: dict[Any, Any] = {
    "svg.fonttype": "none",  # keep text searchable and editable
    "svg.hashsalt": "posttrain",  # the same figure gives the same bytes
}


def entitle(figure: Figure, title: str) -> None:
    """Set the title above all panels."""
    figure.suptitle(title, x=0.012, ha="left", fontweight="bold", fontsize=12)


def plain(text: str, longest: int = 120) -> str:
    """`printable` text for a figure, cut to `longest` characters."""
    shown = printable(text)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def encode(figure: Figure, form: Format) -> bytes:
    """The figure as the bytes of an image file. Dollar signs in labels are literal and do not start math."""
    content = io.BytesIO()
    numbers = {
        id(label)
        for axes in figure.axes
        for label in (*axes.get_xticklabels(which="both"), *axes.get_yticklabels(which="both"))
    }
    for text in figure.findobj(Text):
        if isinstance(text, Text) and id(text) not in numbers:
            text.set_parse_math(False)
            text.set_text(plain(text.get_text()))
    with matplotlib.rc_context(STYLE | _SVG):
        figure.savefig(content, format=form, metadata={"Date": None} if form == "svg" else None)
    return content.getvalue()


def save(figure: Figure, directory: Path, name: str, forms: Sequence[Format]) -> list[Path]:
    """Write the figure to `directory` in each of the formats `forms`; raises `RunError` if that fails."""
    with storage_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for form in forms:
        path = directory / f"{name}.{form}"
        write_atomically(path, encode(figure, form))
        paths.append(path)
    return paths


_LARGEST = 90
"""Marker area of the position with the most rewards, in square points."""
_TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

Profile = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Curves = tuple[np.ndarray, np.ndarray, np.ndarray]


def draw_profile(path: Path, title: str, profile: Profile, curves: Curves, labels: tuple[str, str]) -> None:
    """Write the plot of unit rewards by relative position to `path` (PNG).

    `profile`: positions in (0, 1], means, standard deviations (NaN if unknown) and counts, each [m]. `curves`:
    positions, fitted means and fitted standard deviations, each [g]. `labels`: legend of the two fits. Raises
    `RunError` if the file cannot be written.
    """
    positions, means, stds, counts = profile
    grid, *fitted = curves
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 6.4), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(2, 1, sharex=True)
        parts = (("Mean reward", means), ("Standard deviation of rewards", stds))
        for axes, (name, values), line, label in zip(panels, parts, fitted, labels, strict=True):
            known = ~np.isnan(values)
            areas = np.maximum(_LARGEST * counts[known] / counts.max(), 3)
            look = {"color": BLUE, "alpha": 0.55, "linewidths": 0}
            axes.scatter(positions[known], values[known], s=areas, label="units; area: count", **look)
            axes.plot(grid, line, color=ORANGE, label=label)
            axes.set_title(name)
            axes.set_ylabel("reward")
            axes.legend(loc="best")
        panels[1].set_ylim(bottom=0)
        panels[1].set_xscale("log")
        panels[1].set_xlim(positions[0] / 1.15, 1.15)
        panels[1].xaxis.set_major_locator(FixedLocator([t for t in _TICKS if t >= positions[0] / 1.15]))
        panels[1].xaxis.set_minor_locator(NullLocator())
        panels[1].xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        panels[1].set_xlabel("relative position of the unit in its answer (k / K for unit k of K)")
        entitle(figure, f"Unit rewards by position · {title}")
        content = io.BytesIO()
        figure.savefig(content, format="png")
    with storage_errors(path.parent):
        path.parent.mkdir(exist_ok=True)
    write_atomically(path, content.getvalue())
