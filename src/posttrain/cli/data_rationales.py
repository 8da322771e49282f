"""`posttrain data rationales`: procedures for made-up policies, with a verifier that knows the truth."""

from pathlib import Path
from typing import Annotated

import typer


def rationales(
    out: Annotated[
        Path, typer.Option(help="Directory for the parquet files in sft/, preferences/ and prompts/.")
    ] = Path("rationales"),
    seed: Annotated[int, typer.Option(help="Another seed, other policies.", min=0)] = 0,
    train: Annotated[int, typer.Option(help="Policies to train on; each gives two pairs.", min=1)] = 5000,
    val: Annotated[int, typer.Option(help="Policies for validation.", min=1)] = 500,
    test: Annotated[int, typer.Option(help="Policies for the test.", min=1)] = 500,
) -> None:
    """Write made-up policies with their procedures: conversations for `sft`, pairs for `dpo` and `reward`, and prompts.

    Every procedure is then done on all cases of its policy, and the means are shown. See docs/rationales.md.

    Example:

    posttrain data rationales --out rationales --seed 0 --train 5000 --val 500 --test 500
    """
    from rich.console import Console
    from rich.table import Column, Table

    from posttrain.data.rationales.dataset import write_dataset

    written = write_dataset(out, seed, {"train": train, "val": val, "test": test})
    for path, count in written.files.items():
        typer.echo(f"{path}: {count} rows")
    groups = {"sound": written.measured.sound, **written.measured.corrupted}
    table = Table(Column("procedures", no_wrap=True), "n", "accuracy", "soundness", "efficiency", "reward", "max")
    for name, verdicts in groups.items():
        columns = [
            [verdict.factual_accuracy for verdict in verdicts],
            [verdict.logical_soundness for verdict in verdicts],
            [verdict.efficiency for verdict in verdicts],
            [verdict.reward for verdict in verdicts],
        ]
        cells = [f"{sum(column) / len(column):.3f}" if column else "-" for column in columns]
        table.add_row(name, str(len(verdicts)), *cells, f"{max(columns[3]):.3f}" if verdicts else "-")
    Console().print(table)
