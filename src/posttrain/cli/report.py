"""`posttrain report RUN...`."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of runs, for example runs/run.")],
    out: Annotated[
        Path | None, typer.Option(help="The file; else RUN/report.html, or `report.html` here for several.")
    ] = None,
) -> None:
    """Write one HTML file about runs, which may still be training: tables, curves, episodes with their credit, recipes.

    The file needs nothing else and asks nothing of any server, so it can be sent and kept.

    Examples:

    posttrain report runs/run

    posttrain report runs/ppo runs/grpo --out comparison.html
    """
    from posttrain.reports.html_report import write_html

    file, notes = write_html(runs, out)
    for note in notes:
        typer.echo(note, err=True)
    typer.echo(file)
