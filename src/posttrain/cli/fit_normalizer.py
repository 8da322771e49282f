"""`posttrain fit-normalizer RUN`."""

from pathlib import Path
from typing import Annotated

import typer


def fit_normalizer(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run of `posttrain reward` with `units`, for example runs/rm.")
    ],
    data: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="File of pairs to fit on; without it, the run's validation pairs."),
    ] = None,
) -> None:
    """Fit how the rewards of units depend on where in the answer they stand; writes RUN/normaliser/params.json.

    Examples:

    posttrain fit-normalizer runs/rm

    posttrain fit-normalizer runs/rm --data pairs_val.jsonl
    """
    from posttrain.runs.directory import RunDirectory
    from posttrain.training.unit_normaliser import fit_run

    for line in fit_run(RunDirectory.open(run), data).lines():
        typer.echo(line)
