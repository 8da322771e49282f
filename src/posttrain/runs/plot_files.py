"""What `posttrain plot` writes: the plots of one run, or the figures that compare several."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure

from posttrain.errors import InputError
from posttrain.runs.averages import Bundle, bundles_of
from posttrain.runs.checkpoint_scores import scores_of_runs
from posttrain.runs.comparison import MOST_CURVES, draw_metric, shared_metrics
from posttrain.runs.figure_files import FORMATS, Format, save
from posttrain.runs.files import write_atomically
from posttrain.runs.final_results import draw_results, result_table
from posttrain.runs.metric_names import check_metric, metric_of
from posttrain.runs.panels import keys_of
from posttrain.runs.plots import draw_plots
from posttrain.runs.score_comparison import draw_scores_of_runs
from posttrain.runs.sources import Source, open_sources
from posttrain.runs.tables import Table


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
