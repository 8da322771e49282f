"""Plots of one run or of several, from their metrics logs. Plots without data are not drawn."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from posttrain.errors import InputError
from posttrain.figures.charts import MOST_CURVES, SCORES_AGAINST, chart_of_runs, charts_of
from posttrain.figures.draw import FORMATS, STYLE, Format, draw_charts, entitle, save
from posttrain.figures.results import draw_scores
from posttrain.runs.directory import RunDirectory, write_atomically
from posttrain.runs.evaluated import evaluated_checkpoints
from posttrain.runs.log import Line, Log, read_log
from posttrain.runs.panels import TITLES, Sampling, check_metric, keys_of, metric_of
from posttrain.runs.sources import Source, bundles_of, readable_sources, result_table, shared_metrics
from posttrain.runs.tables import Table, evaluated_table, scores_of_runs


def draw_plots(run: RunDirectory) -> list[Path]:
    """Draw every plot that the run has data for, as PNG files in `run.plots`.

    Returns the files in the order of the report. Raises `RunError` if the metrics are damaged or a file cannot be
    written.
    """
    drawn = figures(run.path.resolve().name, read_log(run.metrics), Sampling.of(run.recipe_values()))
    return [path for name, figure in drawn for path in save(figure, run.plots, name, ("png",))]


def figures(title: str, lines: Sequence[Line], sampling: Sampling = Sampling()) -> Iterator[tuple[str, Figure]]:
    """(name in `TITLES`, figure) for every plot with data; `title` is appended to each figure's own title."""
    log = Log.of(lines)
    order = list(TITLES).index
    charts = sorted(
        (chart for chart in charts_of(log, sampling) if chart.figure), key=lambda chart: order(chart.figure)
    )
    drawn = {name: list(group) for name, group in groupby(charts, key=lambda chart: chart.figure)}
    for name, heading in TITLES.items():
        if name in drawn:
            yield name, draw_charts(drawn[name], f"{heading} · {title}")
        elif name.startswith(SCORES_AGAINST):
            yield from _scores(name, title, log, sampling)


def _scores(name: str, title: str, log: Log, sampling: Sampling = Sampling()) -> Iterator[tuple[str, Figure]]:
    with matplotlib.rc_context(STYLE):
        if (figure := draw_scores(log, name.removeprefix(SCORES_AGAINST), sampling)) is not None:
            entitle(figure, f"{TITLES[name]} · {title}")
            yield name, figure


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
    Raises `InputError` if there is nothing to draw, `RunError` for damaged metrics or if a file cannot be written.
    """
    sources, left_out = readable_sources(paths)
    if until is not None:
        sources = [replace(source, lines=Log.of(source.lines).until(until)) for source in sources]
    single = sources[0].run if len(paths) == len(sources) == 1 else None
    place = Path("plots") if single is None else single.plots
    directory = out or (place if until is None else place / f"until_step_{until}")
    if directory.exists() and not directory.is_dir():
        raise InputError(f"--out {directory} is a file; give a directory")
    if single is not None and not metrics:
        title = single.path.resolve().name + ("" if until is None else f", until step {until}")
        shown = figures(title, sources[0].lines, Sampling.of(sources[0].recipe))
        drawn = [path for name, figure in shown for path in save(figure, directory, name, forms)]
        if not drawn:
            raise InputError(f"{single.metrics} has nothing to plot yet; wait for the first step")
        return drawn, []
    compared = compare(sources, metrics)
    if not compared.figures and not compared.tables:
        what = ", ".join(f"{source.name} ({source.stage or 'a log'})" for source in sources)
        raise InputError(
            f"these have no metric in common: {what}; plot each separately, or select a metric with --metric"
        )
    files = [path for name, figure in compared.figures for path in save(figure, directory, name, forms)]
    if compared.tables:
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
        named = {source.name: source.lines for source in measured}
        tables = (result_table(bundles), scores_of_runs(named) if len(measured) > 1 else None)
        compared.tables += [table for table in tables if table is not None]
        groups = evaluated_checkpoints(measured)
        scores = [evaluated_table(name, lines) for name, lines in groups.items()]
        compared.tables += [table for table in scores if table is not None]
        compared.figures += _figures_of_evaluated(groups)
    for metric in chosen:
        chart, warnings = chart_of_runs(metric, bundles, smooth=True)
        compared.warnings += warnings
        if chart is not None:
            compared.figures.append((chart.figure, draw_charts([chart], metric.panel.title, below=True)))
    return compared


def draw_evaluated(groups: Mapping[str, Log], out: Path) -> list[Path]:
    """Write the figures of scores by checkpoint (PNG) of `evaluated_checkpoints` to `out`; returns the files."""
    return [path for name, figure in _figures_of_evaluated(groups) for path in save(figure, out, name, ("png",))]


def _figures_of_evaluated(groups: Mapping[str, Log]) -> Iterator[tuple[str, Figure]]:
    """(file name without suffix, figure) for each training run with at least two evaluated checkpoints."""
    for group, log in groups.items():
        for title in TITLES:
            if title.startswith(SCORES_AGAINST):
                for name, figure in _scores(title, group, log):
                    yield metric_of(name if len(groups) == 1 else f"{name} {group}").file, figure
