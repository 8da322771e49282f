"""`posttrain compare`."""

from pathlib import Path
from typing import Annotated

import typer


def compare(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="A B [C ...]",
            help="Run directories, results files, or files of predictions or scores. Several training runs of one side "
            "stand with commas, and a side may have a name: `grpo=runs/g1,runs/g2,runs/g3`.",
        ),
    ],
    metrics: Annotated[
        str | None, typer.Option(help="Only these, with commas; all that every side has without it.")
    ] = None,
    common: Annotated[
        bool, typer.Option("--common", help="Compare the items that all sides have, and tell how many.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="Write all numbers to this .json file.")] = None,
) -> None:
    """Compare models on the same items: every other side with the first.

    Examples:

    posttrain compare runs/before runs/after

    posttrain compare base=runs/b1,runs/b2,runs/b3 new=runs/n1,runs/n2,runs/n3 --metrics success

    posttrain compare before.json after.json --out comparison.json
    """
    from rich.console import Console

    from posttrain.evaluation.compare import compare as compare_sides
    from posttrain.evaluation.sides import read_sides

    wanted = None if metrics is None else [name.strip() for name in metrics.split(",") if name.strip()]
    found = compare_sides(read_sides(words, wanted), common, seed)
    table = found.table()
    Console(highlight=False).print(table.rich())
    for line in [table.note, *found.remarks, *(f"warning: {line}" for line in found.warnings)]:
        typer.echo(line)
    if out is not None:
        found.write(out)
        typer.echo(f"comparison: {out}")
    typer.echo(found.sentence())
