"""`posttrain data rationales`: generate the rationales data set."""

from pathlib import Path
from typing import Annotated

import typer


def rationales(
    out: Annotated[
        Path, typer.Option(help="Directory for the parquet files in sft/, preferences/ and prompts/.")
    ] = Path("rationales"),
    seed: Annotated[int, typer.Option(help="Seed of the generated policies.", min=0)] = 0,
    train: Annotated[int, typer.Option(help="Training policies. Each gives two pairs.", min=1)] = 5000,
    val: Annotated[int, typer.Option(help="Validation policies.", min=1)] = 500,
    test: Annotated[int, typer.Option(help="Test policies.", min=1)] = 500,
) -> None:
    """Generate policies with their procedures: conversations for `sft`, pairs for `dpo` and `reward`, and prompts.

    Every procedure is then run on all cases of its policy, and the mean scores are printed. See docs/reference/rationales.md.

    Example:

    posttrain data rationales --out rationales --seed 0 --train 5000 --val 500 --test 500
    """
    from rich.table import Column, Table

    from posttrain.terminal import new_console
    from posttrain_environments.rationales.dataset import write_dataset

    written = write_dataset(out, seed, {"train": train, "val": val, "test": test})
    for path, count in written.files.items():
        typer.echo(f"{path}: {count} rows")
    groups = {"sound": written.scores.sound, **written.scores.corrupted}
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
    new_console().print(table)
