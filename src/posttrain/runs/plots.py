"""Plots of one run or of several, from their metrics logs. Plots without data are not drawn."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from posttrain.errors import InputError
from posttrain.runs.comparison import MOST_CURVES, draw_metric
from posttrain.runs.directory import RunDirectory, write_atomically
from posttrain.runs.evaluated import evaluated_checkpoints
from posttrain.runs.figures import (
    FORMATS,
    STYLE,
    Format,
    average,
    draw_band,
    draw_baselines,
    draw_last_bars,
    draw_result,
    draw_training,
    entitle,
    finish_axes,
    mark_nonfinite,
    new_figure,
    outside_legend,
    save,
    scale_axis,
)
from posttrain.runs.metrics import read_metrics
from posttrain.runs.panels import (
    GREY,
    HELD_OUT,
    PHASES,
    TITLES,
    TRAINING,
    Curve,
    Line,
    Panel,
    Series,
    check_metric,
    keys_of,
    limits_of,
    metric_of,
    panels_of,
    series_of,
)
from posttrain.runs.results import SCORES_AGAINST, draw_results, draw_scores, draw_scores_of_runs, result_table
from posttrain.runs.sources import Bundle, Source, bundles_of, readable_sources, shared_metrics
from posttrain.runs.tables import Table, evaluated_table, plain_numbers, scores_of_runs

MOST_BARS = 40
"""Maximum number of bars in the plot of times. With more steps, a bar is a mean of several."""
_FINAL = {"validation/loss": ("test/loss", "{:.4f}"), "validation/accuracy": ("test/accuracy", "{:.1%}")}
"""Validation metric -> the metric of the final result drawn beside it, and its number format."""


def draw_plots(run: RunDirectory) -> list[Path]:
    """Draw every plot that the run has data for, as PNG files in `run.plots`.

    Returns the files in the order of the report. Raises `RunError` if the metrics are damaged or a file cannot be
    written.
    """
    drawn = figures(run.path.resolve().name, read_metrics(run.metrics))
    return [path for name, figure in drawn for path in save(figure, run.plots, name, ("png",))]


def lines_until(lines: list[Line], until: int | None) -> list[Line]:
    """The lines up to the step `until`, without final results of a later step; all for None."""
    return lines if until is None else [line for line in lines if line["step"] <= until]


def figures(title: str, lines: list[Line]) -> Iterator[tuple[str, Figure]]:
    """(name in `TITLES`, figure) for every plot with data; `title` is appended to each figure's own title."""
    for name, heading in TITLES.items():
        with matplotlib.rc_context(STYLE):
            figure = draw_figure(name, lines)
        if figure is not None:
            entitle(figure, f"{heading} · {title}")
            yield name, figure


def draw_figure(name: str, lines: list[Line]) -> Figure | None:
    """The figure called `name` in `TITLES`, without a title; None if the run has no data for it."""
    if name == "learning_curve":
        return _learning_curve(lines)
    if name.startswith(SCORES_AGAINST):
        return draw_scores(lines, name.removeprefix(SCORES_AGAINST))
    return _time(lines) if name == "time" else _panels(lines, panels_of(name, lines))


def _learning_curve(lines: list[Line]) -> Figure | None:
    """Success rate on held-out seeds, or the mean return if the environment does not report success."""
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
    interval = ", 95% interval shaded; horizontal lines: baselines on the final seeds" if limits else ""
    axes.set_title(
        f"{unit} on held-out seeds{interval}" if held_out else f"{unit}, training episodes only: no evaluation yet"
    )
    shown += draw_baselines(axes, lines, key, form)
    shown += draw_result(axes, lines, key, "result on the final seeds", form)
    scale_axis(axes, Panel("", "", (), whole=is_rate, from_zero=False), [*shown, *limits])
    finish_axes(axes, unit, percent=is_rate)
    outside_legend(axes)
    return figure


def _panels(lines: list[Line], panels: list[Panel]) -> Figure | None:
    filled = []
    for panel in panels:
        present = [(curve, series) for curve in panel.curves if (series := series_of(lines, curve.key)) is not None]
        # Leave out metrics that are 0 at every step, such as skipped updates.
        if any(series.nonfinite or any(series.values) for _, series in present):
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
        intervals = [(curve.color, limits_of(lines, curve.key)) for curve, _ in present]
        limits = draw_last_bars(axes, [(color, rows[-1]) for color, rows in intervals if rows])
    if panel.reference is not None:
        value, label = panel.reference
        axes.axhline(value, color=GREY, linestyle="--", linewidth=1.2, label=label, zorder=2)
    how = "95% interval at the end" if panel.compared else "95% interval shaded"
    axes.set_title(f"{panel.title}, {how}" if limits else panel.title)
    scale_axis(axes, panel, [*shown, *limits])
    mark_nonfinite(axes, [series for _, series in present])
    finish_axes(axes, panel.unit, panel.percent)
    if max(map(abs, shown), default=1.0) < 1e-3:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain_numbers(f"{value:g}")))
    axes.legend(loc="best")


def _time(lines: list[Line]) -> Figure | None:
    rows = [line for line in lines if line["kind"] == "train" and any(line.get(f"time/{phase}") for phase in PHASES)]
    if not rows:
        return None
    seconds = {phase: [line.get(f"time/{phase}") or 0.0 for line in rows] for phase in PHASES}
    known = [sum(values) for values in zip(*seconds.values(), strict=True)]
    # Include the time outside all phases, so that the height of a bar is the duration of a step.
    seconds["other"] = [
        max(0.0, (line.get("time/step") or 0.0) - timed) for line, timed in zip(rows, known, strict=True)
    ]
    total = sum(sum(values) for values in seconds.values())
    per_bar = math.ceil(len(rows) / MOST_BARS)
    starts = range(0, len(rows), per_bar)
    centers = [average([row["step"] for row in rows[start : start + per_bar]]) for start in starts]
    gaps = [b - a for a, b in itertools.pairwise(centers)]
    width = 0.85 * min(gaps, default=per_bar)
    figure, (axes,) = new_figure(1)
    axes.set_title(f"each bar is the mean of {per_bar} steps" if per_bar > 1 else "each bar is one step")
    bottom = [0.0] * len(centers)
    for phase, values in seconds.items():
        if sum(values) <= 0.001 * total:
            continue
        heights = [average(values[start : start + per_bar]) for start in starts]
        label = f"{phase.replace('_', ' ')}, {sum(values) / total:.0%}"
        axes.bar(centers, heights, width, bottom, color=PHASES.get(phase, "#C4C4C4"), label=label, linewidth=0)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.grid(visible=False, axis="x")
    finish_axes(axes, "seconds per step")
    outside_legend(axes)
    if len(centers) == 1:
        axes.set_xlim(centers[0] - 3, centers[0] + 3)
    return figure


@dataclass
class Compared:
    """Figures and tables that compare several runs."""

    figures: list[tuple[str, Figure]] = field(default_factory=list)
    """(file name without suffix, figure), in the order of the report."""
    tables: list[Table] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """Warnings about omitted data, with reasons."""


def plot_files(
    paths: Sequence[Path],
    out: Path | None = None,
    forms: Sequence[Format] = FORMATS,
    metrics: Sequence[str] = (),
    until: int | None = None,
) -> tuple[list[Path], list[str]]:
    """Write the figures of the runs and TensorBoard logs at `paths`; returns the files, and warnings.

    For a single run, these are the plots of its report. For several runs, they are one figure per metric (or per entry
    of `metrics`) and tables of the results. Runs that evaluated checkpoints of one training run also get a table and
    figures of scores by checkpoint. `out` defaults to the `plots` of the single run (with `until`, to a folder in it),
    or to `plots` in the working directory. `until` leaves out later steps.
    Raises `InputError` if there is nothing to draw, `RunError` if no metrics can be read, or if a file cannot be written.
    """
    sources, left_out = readable_sources(paths)
    single = sources[0].run if len(paths) == len(sources) == 1 else None
    place = Path("plots") if single is None else single.plots
    directory = out or (place if until is None else place / f"until_step_{until}")
    if directory.exists() and not directory.is_dir():
        raise InputError(f"--out {directory} is a file; give a directory")
    if single is not None and not metrics:
        title = single.path.resolve().name + ("" if until is None else f", until step {until}")
        shown = figures(title, lines_until(sources[0].lines, until))
        drawn = [path for name, figure in shown for path in save(figure, directory, name, forms)]
        if not drawn:
            raise InputError(f"{single.metrics} has nothing to plot yet; wait for the first step")
        return drawn, []
    sources = [replace(source, lines=lines_until(source.lines, until)) for source in sources]
    compared = compare(sources, metrics)
    if not compared.figures and not compared.tables:
        what = ", ".join(f"{source.name} ({source.stage or 'a log'})" for source in sources)
        raise InputError(
            f"these have no metric in common: {what}; plot each separately, or select a metric with --metric"
        )
    files = [path for name, figure in compared.figures for path in save(figure, directory, name, forms)]
    if compared.tables:
        directory.mkdir(parents=True, exist_ok=True)
        text = "\n\n".join(f"## {table.title}\n\n{table.markdown()}\n\n{table.note}" for table in compared.tables)
        write_atomically(directory / "results.md", f"{text}\n")
        files.append(directory / "results.md")
    return files, [*left_out, *compared.warnings]


def compare(sources: Sequence[Source], metrics: Sequence[str] = ()) -> Compared:
    """Figures and tables of `sources`; `metrics` selects metrics and leaves out the tables.

    Raises `InputError` if nothing has been measured, for a metric that no run has, and for too many curves.
    """
    compared = Compared()
    measured = [source for source in sources if source.lines]
    compared.warnings += [f"{one.path} has no metrics yet and is left out" for one in sources if not one.lines]
    if not measured:
        raise InputError(f"{', '.join(str(one.path) for one in sources)}: nothing to plot yet; wait for the first step")
    bundles, warnings = bundles_of(measured)
    compared.warnings += warnings
    if len(bundles) > MOST_CURVES:
        raise InputError(
            f"{len(bundles)} curves cannot be distinguished in one figure; give at most {MOST_CURVES} runs"
        )
    present = {key for source in measured for key in keys_of(source.lines)}
    final_only = {key for source in measured for line in source.lines if line["kind"] == "final" for key in line}
    for key in metrics:
        check_metric(key, present, final_only)
    compared.warnings += [f"{one.name} has done {one.unfinished}" for one in measured if one.unfinished]
    chosen, warnings = ([metric_of(key) for key in dict.fromkeys(metrics)], []) if metrics else shared_metrics(bundles)
    compared.warnings += warnings
    if not metrics:
        compared.figures += _overviews(bundles)
        named = {source.name: source.lines for source in measured}
        tables = (result_table(bundles), scores_of_runs(named) if len(measured) > 1 else None)
        compared.tables += [table for table in tables if table is not None]
        groups = evaluated_checkpoints(measured)
        scores = [evaluated_table(name, lines) for name, lines in groups.items()]
        compared.tables += [table for table in scores if table is not None]
        compared.figures += _figures_of_evaluated(groups)
    for metric in chosen:
        figure, warnings = draw_metric(metric, bundles)
        compared.warnings += warnings
        if figure is not None:
            compared.figures.append((metric.file, figure))
    return compared


def draw_evaluated(groups: Mapping[str, list[Line]], out: Path) -> list[Path]:
    """Write the figures of scores by checkpoint (PNG) of `evaluated_checkpoints` to `out`; returns the files."""
    return [path for name, figure in _figures_of_evaluated(groups) for path in save(figure, out, name, ("png",))]


def _figures_of_evaluated(groups: Mapping[str, list[Line]]) -> list[tuple[str, Figure]]:
    """(file name without suffix, figure) for each training run with at least two evaluated checkpoints."""
    drawn = []
    for name, lines in groups.items():
        for figure_name in [title for title in TITLES if title.startswith(SCORES_AGAINST)]:
            with matplotlib.rc_context(STYLE):
                if (figure := draw_figure(figure_name, lines)) is not None:
                    entitle(figure, f"{TITLES[figure_name]} · {name}")
                    drawn.append((metric_of(figure_name if len(groups) == 1 else f"{figure_name} {name}").file, figure))
    return drawn


def _overviews(bundles: Sequence[Bundle]) -> Iterator[tuple[str, Figure]]:
    for name, figure in (("results", draw_results(bundles)), ("scores", draw_scores_of_runs(bundles))):
        if figure is not None:
            yield name, figure
