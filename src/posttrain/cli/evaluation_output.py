"""How results of `posttrain evaluate text` and `reward` are shown and kept."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from posttrain.evaluation.results import Results


def show(results: "Results", out: Path | None) -> None:
    """Print the table, keep the results in `out`, and end with an InputError that names what could not be had."""
    from rich.console import Console

    from posttrain.errors import InputError

    if results.measured:
        table = results.table()
        Console(highlight=False).print(table.rich())
        for line in [table.note, *results.remarks()]:
            typer.echo(line)
        if out is not None:
            results.write(out)
            typer.echo(f"results: {out}")
    if results.failed:
        kept = "the other metrics are kept" if results.measured else "nothing was measured"
        raise InputError("\n".join(f"{reason} ({kept})" for reason in results.failed.values()))
