"""Plots of a run from its metrics.jsonl. A plot without data is not drawn."""

import io
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from posttrain.errors import InputError
from posttrain.runs.comparison import MOST_CURVES, Bundle, bundles_of, draw_metric, draw_scores_of_runs, shared_metrics
from posttrain.runs.directory import RunDirectory
from posttrain.runs.figures import (
    FORMATS,
    OUTSIDE,
    STYLE,
    Format,
    average,
    draw_band,
    draw_last_bars,
    draw_references,
    draw_result,
    draw_training,
    entitle,
    finish_axes,
    mark_nonfinite,
    new_figure,
    save,
    scale_axis,
)
from posttrain.runs.files import storage_errors, write_atomically
from posttrain.runs.final_results import draw_results, result_table
from posttrain.runs.metrics import check_metric, metric_of, read_metrics
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
    keys_of,
    limits_of,
    panels_of,
    series_of,
)
from posttrain.runs.scores import draw_scores, scores_of_runs
from posttrain.runs.sources import Source, open_sources
from posttrain.runs.tables import Table

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


@dataclass
class Compared:
    """Several runs side by side."""

    figures: list[tuple[str, Figure]] = field(default_factory=list)
    """Name of the file and figure, in the order of a report."""
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was left out, and why."""


def plot_files(
    paths: Sequence[Path], out: Path | None = None, forms: Sequence[Format] = FORMATS, metrics: Sequence[str] = ()
) -> tuple[list[Path], list[str]]:
    """Write the figures of the runs and TensorBoard logs at `paths`; returns the files, and what was left out.

    One run has the plots that its report has; several have a figure for each metric, or for each of `metrics`, and the
    tables of their results. Without `out` they go to the plots of the one run, or to `plots` in the working folder.
    Raises `InputError` where nothing can be drawn, `RunError` for damaged metrics and a disk that refuses.
    """
    sources = open_sources(paths)
    single = sources[0].run if len(sources) == 1 else None
    directory = out or (Path("plots") if single is None else single.plots)
    if directory.exists() and not directory.is_dir():
        raise InputError(f"--out {directory} is a file; give a directory")
    if single is not None and not metrics:
        drawn = draw_plots(single, directory, forms)
        if not drawn:
            raise InputError(f"{single.metrics} has nothing to plot yet; wait for the first step")
        return drawn, []
    compared = compare(sources, metrics)
    if not compared.figures and not compared.tables:
        what = ", ".join(f"{source.name} ({source.stage or 'a log'})" for source in sources)
        raise InputError(f"these have no metric in common: {what}; plot each alone, or name a metric with --metric")
    files = [path for name, figure in compared.figures for path in save(figure, directory, name, forms)]
    if compared.tables:
        directory.mkdir(parents=True, exist_ok=True)
        text = "\n\n".join(f"## {table.title}\n\n{table.markdown()}\n\n{table.note}" for table in compared.tables)
        write_atomically(directory / "results.md", f"{text}\n")
        files.append(directory / "results.md")
    return files, compared.notes


def compare(sources: Sequence[Source], metrics: Sequence[str] = ()) -> Compared:
    """Figures and tables of `sources`; with `metrics`, the figures of these alone.

    `InputError` where nothing has been measured, for a metric that no run has, and for more curves than can be told
    apart.
    """
    compared = Compared()
    measured = [source for source in sources if source.lines]
    compared.notes += [f"{one.path} has no metrics yet and is left out" for one in sources if not one.lines]
    if not measured:
        raise InputError(f"{', '.join(str(one.path) for one in sources)}: nothing to plot yet; wait for the first step")
    bundles, notes = bundles_of(measured)
    compared.notes += notes
    if len(bundles) > MOST_CURVES:
        raise InputError(f"{len(bundles)} curves cannot be told apart in one figure; give at most {MOST_CURVES} runs")
    present = {key for source in measured for key in keys_of(source.lines)}
    at_the_end = {key for source in measured for line in source.lines if line["kind"] == "final" for key in line}
    for key in metrics:
        check_metric(key, present, at_the_end)
    compared.notes += [f"{one.name} has done {one.unfinished}" for one in measured if one.unfinished]
    chosen, notes = ([metric_of(key) for key in dict.fromkeys(metrics)], []) if metrics else shared_metrics(bundles)
    compared.notes += notes
    if not metrics:
        compared.figures += _overviews(bundles)
        named = {source.name: source.lines for source in measured}
        tables = (result_table(bundles), scores_of_runs(named) if len(measured) > 1 else None)
        compared.tables += [table for table in tables if table is not None]
    for metric in chosen:
        figure, notes = draw_metric(metric, bundles)
        compared.notes += notes
        if figure is not None:
            compared.figures.append((metric.file, figure))
    return compared


def _overviews(bundles: Sequence[Bundle]) -> Iterator[tuple[str, Figure]]:
    for name, figure in (("results", draw_results(bundles)), ("scores", draw_scores_of_runs(bundles))):
        if figure is not None:
            yield name, figure


_LARGEST = 90
"""Area of the marker of the position with the most rewards, in square points."""
_TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

Profile = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Curves = tuple[np.ndarray, np.ndarray, np.ndarray]


def draw_profile(path: Path, title: str, profile: Profile, curves: Curves, labels: tuple[str, str]) -> None:
    """Write the plot to `path` (PNG).

    `profile`: positions in (0, 1], means, standard deviations (NaN where unknown) and counts, [m] each; `curves`:
    positions, fitted means and fitted deviations, [g] each; `labels`: of the two fits. Raises `RunError` when the disk
    refuses.
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
            axes.scatter(positions[known], values[known], s=areas, label="units, area: how many", **look)
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
        panels[1].set_xlabel("place of the unit in its answer (unit k of K stands at k / K)")
        figure.suptitle(f"Unit rewards by place · {title}", x=0.012, ha="left", fontweight="bold", fontsize=12)
        content = io.BytesIO()
        figure.savefig(content, format="png")
    with storage_errors(path.parent):
        path.parent.mkdir(exist_ok=True)
    write_atomically(path, content.getvalue())
