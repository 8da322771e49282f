"""`posttrain plot RUN`."""

from pathlib import Path
from typing import Annotated

import typer


def plot(run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run, for example runs/run.")]) -> None:
    """Draw the plots of a run from its metrics into RUN/plots; it may still be training."""
    from posttrain.errors import InputError
    from posttrain.runs.directory import RunDirectory
    from posttrain.runs.plots import draw_plots

    directory = RunDirectory.open(run)
    drawn = draw_plots(directory)
    if not drawn:
        raise InputError(f"{directory.metrics} has nothing to plot yet; wait for the first step")
    for path in drawn:
        typer.echo(path)
