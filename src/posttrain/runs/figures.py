"""How metrics are drawn: axes, curves with their 95% intervals, and what they are compared with."""

import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator, PercentFormatter

from posttrain.runs.files import storage_errors, write_atomically
from posttrain.runs.panels import GREEN, GREY, PURPLE, RED, SKY, Line, Panel, Series, limits_of

SMOOTHED_STEPS = 11
"""Steps of a moving mean, an odd number: as many before a step as after it."""
MOST_BARS = 12
"""A band with more points than this shows no bar at each of them."""

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
OUTSIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.2}
"""Where a legend does not cover what is drawn."""


def new_figure(count: int) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels, one above the other, that share their steps."""
    figure = Figure(figsize=(8, 4.6) if count == 1 else (8, 2.6 * count + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(count, 1, squeeze=False, sharex=True)[:, 0])


def finish_axes(axes: Axes, unit: str, percent: bool = False) -> None:
    """Name the axes; steps are whole numbers."""
    axes.set_ylabel(unit)
    place = axes.get_subplotspec()
    if place is None or place.is_last_row():
        axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def draw_training(axes: Axes, series: Series, label: str, color: str, strength: float = 0.9) -> None:
    """A curve of training steps: as it is, or faint behind its moving mean where there are many steps."""
    many = len(series.steps) > 2 * SMOOTHED_STEPS
    look: dict[str, Any] = {"alpha": 0.3 if many else strength, "linewidth": 1.0, "marker": "" if many else "o"}
    axes.plot(series.steps, series.values, color=color, label="_each step" if many else label, **look)
    if many:
        label = f"{label}, mean of {SMOOTHED_STEPS} steps"
        means = smoothed(series.values)
        axes.plot(series.steps[2:-2], means, color=color, linewidth=1.4, label=label)


def draw_band(axes: Axes, lines: list[Line], key: str, color: str) -> list[float]:
    """The 95% interval of the held-out metric `key`, where it has one; returns its limits."""
    rows = limits_of(lines, key)
    if not rows:
        return []
    steps, low, _, high = (list(column) for column in zip(*rows, strict=True))
    axes.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0)
    if len(rows) <= MOST_BARS:
        # A band over one point has no area; few points bear bars as well.
        for step, below, value, above in rows:
            _bar(axes, step, below, value, above, color)
    return low + high


def draw_last_bars(axes: Axes, last: Sequence[tuple[str, tuple[int, float, float, float]]]) -> list[float]:
    """95% intervals, each a colour and (step, low, value, high), side by side to the right of their steps.

    Returns their limits.
    """
    span = axes.dataLim.width or 1.0
    for place, (color, (step, low, value, high)) in enumerate(last, start=1):
        _bar(axes, step + 0.012 * place * span, low, value, high, color, fmt="_", alpha=1.0)
    return [limit for _, (_, low, _, high) in last for limit in (low, high)]


def _bar(
    axes: Axes, step: float, low: float, value: float, high: float, color: str, fmt: str = "none", alpha: float = 0.7
) -> None:
    lengths = [[max(0.0, value - low)], [max(0.0, high - value)]]
    axes.errorbar([step], [value], lengths, fmt=fmt, color=color, ecolor=color, elinewidth=1.0, capsize=3, alpha=alpha)


def draw_references(axes: Axes, lines: list[Line], key: str, form: str) -> list[float]:
    """Reference players dashed, others dotted, each line its own colour or dots; returns their values."""
    latest = {line["policy"]: line[key] for line in lines if line["kind"] == "baseline" and line.get(key) is not None}
    references = {"optimal": GREEN, "random": RED}
    rest = itertools.cycle(itertools.product((":", (0, (4, 1, 1, 1))), (GREY, PURPLE, SKY, "#222222")))
    for player in sorted(latest, key=lambda player: -latest[player]):
        is_reference = player in references
        name = f"{player} policy" if is_reference else player
        line, color = ("--", references[player]) if is_reference else next(rest)
        axes.axhline(
            latest[player],
            color=color,
            linestyle=line,
            linewidth=1.5,
            label=f"{name}, {form.format(latest[player])}",
            zorder=2,
        )
    return list(latest.values())


def draw_result(axes: Axes, lines: list[Line], key: str, what: str, form: str) -> list[float]:
    """The final result as a star at the step of its checkpoint, with its interval; returns what must be in sight."""
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
    """Choose the stretch of the y axis for all that is drawn."""
    if panel.whole:
        axes.set_ylim(-0.03, 1.05)
    elif not values:
        axes.set_yticks([])
    elif panel.logarithmic and min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
    elif panel.from_zero and min(values) >= 0:
        axes.set_ylim(0, 1.1 * max(values) or 1)


def mark_nonfinite(axes: Axes, drawn: Sequence[Series]) -> None:
    """Crosses at the foot, at steps where a metric was no number."""
    steps = sorted({step for series in drawn for step in series.nonfinite})
    if steps:
        place: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 5}
        axes.plot(steps, [0.0] * len(steps), "x", color=RED, markersize=7, label="NaN or infinite", **place)


def average(values: Sequence[float]) -> float:
    """The mean; `values` is not empty."""
    return math.fsum(values) / len(values)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean around each value but the first two and the last two.

    It is centred, because a mean of past steps lags behind and makes a falling loss look worse than it is. Towards
    both ends the window shrinks, to five values.
    """
    reach = [min(place, len(values) - 1 - place, SMOOTHED_STEPS // 2) for place in range(len(values))]
    return [average(values[place - r : place + r + 1]) for place, r in enumerate(reach) if r >= 2]


Format = Literal["png", "svg"]
FORMATS: tuple[Format, ...] = get_args(Format)
_SVG: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, which can be searched and edited
    "svg.hashsalt": "posttrain",  # and the same figure is the same file
}


def entitle(figure: Figure, title: str) -> None:
    """The title above all panels."""
    figure.suptitle(title, x=0.012, ha="left", fontweight="bold", fontsize=12)


def plain(text: str, longest: int = 120) -> str:
    """What can be drawn of a name that somebody gave: no control characters, and not too long for a figure."""
    shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def encode(figure: Figure, form: Format) -> bytes:
    """The content of a file. Dollar signs in names are no mathematics."""
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
    """Write the figure to `directory`, once in each form; `RunError` when the disk refuses."""
    with storage_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for form in forms:
        path = directory / f"{name}.{form}"
        write_atomically(path, encode(figure, form))
        paths.append(path)
    return paths
