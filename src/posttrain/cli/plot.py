"""`posttrain plot RUN...`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class FigureFormat(StrEnum):
    """A format of figures."""

    PNG = "png"
    SVG = "svg"


def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Directories of runs; also event files of TensorBoard and folders of them."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the figures; else RUN/plots, or `plots` here for several.")
    ] = None,
    formats: Annotated[
        list[FigureFormat], typer.Option("--format", help="png or svg; both unless given, and may be given twice.")
    ] = [FigureFormat.PNG, FigureFormat.SVG],  # noqa: B006
    metrics: Annotated[
        list[str], typer.Option("--metric", metavar="KEY", help="Any metric of metrics.jsonl; may be given again.")
    ] = [],  # noqa: B006
) -> None:
    """Draw the metrics of runs, which may still be training: of one, its plots; of several, a figure for each metric.

    Runs that differ by `seed` alone are one curve: their mean with its 95% interval over seeds.

    Examples:

    posttrain plot runs/run

    posttrain plot runs/ppo runs/grpo-1 runs/grpo-2 runs/grpo-3 --out figures --format svg

    posttrain plot runs/a runs/b --metric policy/mismatch
    """
    from posttrain.runs.figure_files import FORMATS
    from posttrain.runs.plot_files import plot_files

    forms = [form for form in FORMATS if FigureFormat(form) in formats]
    drawn, notes = plot_files(runs, out, forms, metrics)
    for note in notes:
        typer.echo(note, err=True)
    for path in drawn:
        typer.echo(path)
