"""Pictures of charts, and image files."""

import io
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from posttrain.figures.charts import DASHES, SMOOTHED_STEPS, Chart, Trace, smoothed, thinned
from posttrain.recipe.metrics import BLUE, GREEN, ORANGE, RED
from posttrain.runs.directory import write_atomically
from posttrain.runs.panels import MOST_POINTS
from posttrain.runs.tables import plain_numbers
from posttrain.terminal import printable

MARKERS = "o^vDsP"
MOST_BARS = 40
"""Maximum number of bars in a stacked chart. With more steps, a bar is a mean of several."""
_MOST_BANDS = 3
"""With more curves than this, intervals are bars at the last step, because many bands hide each other."""
_MOST_DRAWN = 1_000
"""Points of a curve in a picture, about one per pixel. Curves that go up and down take as long as all else to draw."""
_MOST_LIMITS = 12
"""Intervals of more evaluations than this are shaded."""

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


def new_figure(count: int) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels in a column with a shared x axis."""
    figure = Figure(figsize=(8, 4.6) if count == 1 else (8, 2.6 * count + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(count, 1, squeeze=False, sharex=True)[:, 0])


def draw_charts(charts: Sequence[Chart], title: str, below: bool = False) -> Figure:
    """The picture of charts in a column. `below`: with the legend below, as for the curves of several runs."""
    with matplotlib.rc_context(STYLE):
        figure, panels = new_figure(len(charts))
        for axes, chart in zip(panels, charts, strict=True):
            (_stack if chart.stacked else _draw)(axes, chart)
            if not below and (chart.stacked or chart.results or len(chart.levels) > 1):
                legend = axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2)  # beside the axes
                for label in legend.get_texts():
                    label.set_text(plain(label.get_text(), 44))  # longer labels leave no width for the axes
            elif not below:
                axes.legend(loc="best")
        if below:
            handles, labels = panels[0].get_legend_handles_labels()
            columns = max(1, min(4, len(labels), 95 // (max(map(len, labels), default=1) + 8)))
            figure.set_figheight(figure.get_figheight() + 0.22 * math.ceil(len(labels) / columns))
            figure.legend(handles, labels, loc="outside lower left", ncols=columns, fontsize=9, frameon=False)
        entitle(figure, title)
    return figure


def _draw(axes: Axes, chart: Chart) -> None:
    panel, shown, limits = chart.panel, list[float](), list[float]()
    banded = [trace for trace in chart.traces if trace.low]
    at_end = panel.compared or len(chart.traces) > _MOST_BANDS
    notes = [chart.note] if chart.note else []
    smooths = [
        trace for trace in chart.traces if panel.smoothed and trace.trained and len(trace.x) > 2 * SMOOTHED_STEPS
    ]
    notes += [f"moving mean of {SMOOTHED_STEPS} steps"] if smooths else []
    for number, trace in enumerate(chart.traces):
        look: dict[str, Any] = {"color": trace.color, "linestyle": DASHES[trace.dash], "label": trace.label}
        look["marker"] = MARKERS[number % len(MARKERS)] if len(trace.x) <= 40 else ""
        if not trace.trained and len(trace.x) <= 2:  # nothing is known between them
            look["linestyle"] = "none"
        steps, values = trace.x, trace.y
        shown += [float(values.min()), float(values.max())] if len(values) else []
        if any(trace is one for one in smooths):
            if len(chart.traces) <= _MOST_BANDS:
                kept = thinned(values, _MOST_DRAWN)
                axes.plot(steps[kept], values[kept], color=trace.color, alpha=0.25, linewidth=0.8, label="_each step")
            steps, values = steps[2:-2], smoothed(values)
        kept = thinned(values, _MOST_DRAWN)
        axes.plot(steps[kept], values[kept], zorder=3, **look)
        if trace.low and not at_end:
            limits += _band(axes, trace)
    if at_end:
        for position, trace in enumerate(banded, start=1):
            if rows := _rows(trace):
                step, low, value, high = rows[-1]
                # Side by side, to the right of the last step.
                _bar(axes, step + 0.012 * position * (axes.dataLim.width or 1.0), low, value, high, trace.color, "_")
                limits += [low, high]
    for level in chart.levels:
        style = "--" if level["color"] in (GREEN, RED) else ":"
        form = f"{level['value']:.1%}" if panel.percent else f"{level['value']:.3f}"
        look = {"color": level["color"], "linestyle": style, "linewidth": 1.2, "zorder": 2}
        axes.axhline(level["value"], label=f"{level['label']}, {form}", **look)
        shown.append(level["value"])
    for label, step, (value, low, high) in chart.results:
        look = {"color": "black", "markersize": 11, "capsize": 3, "elinewidth": 1.0, "zorder": 6}
        lengths = [[max(0.0, value - low)], [max(0.0, high - value)]]
        axes.errorbar([step], [value], lengths, fmt="*", label=label, **look)
        shown += [value, low, high]
    if limits and not chart.note:
        notes.append("95% interval at the end" if at_end else "95% intervals")
    axes.set_title(textwrap.fill(", ".join([chart.subtitle, *notes]), 92))
    heights = [*shown, *limits]
    if panel.whole:
        axes.set_ylim(-0.03, 1.05)
    elif not heights:
        axes.set_yticks([])
    elif panel.logarithmic and min(heights) > 0 and max(heights) > 20 * min(heights):
        axes.set_yscale("log")
    elif panel.from_zero and min(heights) >= 0:
        axes.set_ylim(0, 1.1 * max(heights) or 1)
    if nonfinite := sorted({step for trace in chart.traces for step in trace.nonfinite}):
        look = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 5}  # at the bottom of the axes
        axes.plot(nonfinite, [0.0] * len(nonfinite), "x", color=RED, markersize=7, label="NaN or infinite", **look)
    finish_axes(axes, panel.unit, panel.percent)
    if max(map(abs, shown), default=1.0) < 1e-3:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain_numbers(f"{value:g}")))


def _stack(axes: Axes, chart: Chart) -> None:
    """Bars of at most `MOST_BARS` parts of the steps, each the mean of its part."""
    steps = chart.traces[0].x
    per_bar = math.ceil(len(steps) / MOST_BARS)
    starts = np.arange(0, len(steps), per_bar)
    counts = np.diff([*starts, len(steps)])
    centers, bottom = np.add.reduceat(steps, starts) / counts, np.zeros(len(starts))
    width = 0.85 * float(np.diff(centers).min(initial=np.inf if len(centers) > 1 else per_bar))
    for trace in chart.traces:
        assert trace.own is not None
        heights = np.add.reduceat(trace.own, starts) / counts
        axes.bar(centers, heights, width, bottom, color=trace.color, label=trace.label, linewidth=0)
        bottom = bottom + heights
    axes.set_title(f"each bar is the mean of {per_bar} steps" if per_bar > 1 else "each bar is one step")
    axes.grid(visible=False, axis="x")
    finish_axes(axes, chart.panel.unit)
    if len(centers) == 1:
        axes.set_xlim(centers[0] - 3, centers[0] + 3)


def finish_axes(axes: Axes, unit: str, percent: bool = False) -> None:
    """Label the axes, and put integer ticks on the step axis."""
    axes.set_ylabel(unit)
    subplot = axes.get_subplotspec()
    if subplot is None or subplot.is_last_row():
        axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _rows(trace: Trace) -> list[tuple[int, float, float, float]]:
    """(step, low, value, high) of the points with an interval."""
    rows = zip(trace.x, trace.low or (), trace.y, trace.high or (), strict=True) if trace.low else ()
    return [(int(x), low, float(y), high) for x, low, y, high in rows if low is not None and high is not None]


def _band(axes: Axes, trace: Trace) -> list[float]:
    """Draw the 95% intervals of a curve; returns the limits."""
    rows = _rows(trace)
    if not rows:
        return []
    rows = rows[:: -(-len(rows) // MOST_POINTS)]
    steps, low, _, high = (list(column) for column in zip(*rows, strict=True))
    if trace.trained or len(rows) > _MOST_LIMITS:
        axes.fill_between(steps, low, high, color=trace.color, alpha=0.18, linewidth=0)
    else:  # a shade would claim certainty between few evaluations
        for row in rows:
            _bar(axes, *row, trace.color)
    return low + high


def _bar(axes: Axes, step: float, low: float, value: float, high: float, color: str, fmt: str = "none") -> None:
    lengths = [[max(0.0, value - low)], [max(0.0, high - value)]]
    axes.errorbar([step], [value], lengths, fmt=fmt, color=color, ecolor=color, elinewidth=1.0, capsize=3, alpha=0.7)


Format = Literal["png", "svg"]
FORMATS: tuple[Format, ...] = get_args(Format)
_SVG: dict[Any, Any] = {
    "svg.fonttype": "none",  # keep text searchable and editable
    "svg.hashsalt": "posttrain",  # the same figure gives the same bytes
}


def entitle(figure: Figure, title: str, columns: int = 70) -> None:
    """Set the title above all panels, in lines of at most `columns` characters."""
    figure.suptitle(
        textwrap.fill(title, columns, break_on_hyphens=False), x=0.012, ha="left", fontweight="bold", fontsize=12
    )


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
    paths = [directory / f"{name}.{form}" for form in forms]
    for path, form in zip(paths, forms, strict=True):
        write_atomically(path, encode(figure, form))
    return paths


_LARGEST = 90
"""Marker area of the position with the most rewards, in square points."""

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
        ticks = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
        panels[1].xaxis.set_major_locator(FixedLocator([tick for tick in ticks if tick >= positions[0] / 1.15]))
        panels[1].xaxis.set_minor_locator(NullLocator())
        panels[1].xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        panels[1].set_xlabel("relative position of the unit in its answer (k / K for unit k of K)")
        entitle(figure, f"Unit rewards by position · {title}")
    save(figure, path.parent, path.stem, ("png",))
