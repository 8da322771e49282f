"""`posttrain data worlds`: generated vaults of notes, with tasks whose correct answer is known."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from posttrain_memory.worlds.recipe import WorldRecipe


def worlds(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value ...]", help="Settings of the worlds, such as notes=4 or bare=true."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Output directory.")] = Path("worlds"),
    seed: Annotated[int, typer.Option(help="Random seed of the worlds.", min=0)] = 0,
    train: Annotated[int, typer.Option(help="Number of training worlds.", min=0)] = 400,
    dev: Annotated[int, typer.Option(help="Number of worlds for selecting a checkpoint.", min=0)] = 40,
    test: Annotated[int, typer.Option(help="Number of test worlds.", min=0)] = 40,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="Write JSON lines instead of Parquet.")] = False,
) -> None:
    """Write generated worlds of notes and tasks about them: facts to find, to change, to ask about, and to keep
    private.

    No world is in two splits, and no question occurs twice. See docs/reference/worlds.md for the keys and the columns.

    Examples:

    posttrain data worlds --out worlds --seed 0 --train 400 --dev 40 --test 40

    posttrain data worlds --train 2000 notes=4 facts=[1,2] filler=[0,0] bare=true back_links=false
    """
    from posttrain.cli.env import environment_of
    from posttrain.data.files import write_rows
    from posttrain_memory.worlds.dataset import SPLITS, row_of, samples

    recipe: WorldRecipe = environment_of("memory", [f"worlds.{word}" for word in words or []]).worlds  # type: ignore[attr-defined]
    counts = {"test": test, "dev": dev, "train": train}
    generated = list(samples(seed, recipe, counts))
    for split in reversed(SPLITS):
        rows = [row_of(sample) for sample in generated if sample.split == split]
        if rows:
            path = out / f"worlds_{split}.{'jsonl' if jsonl else 'parquet'}"
            write_rows(path, rows)
            kinds = Counter(row["kind"] for row in rows)
            counted = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
            typer.echo(f"{path}: {len(rows)} tasks in {len({row['world'] for row in rows})} worlds: {counted}")
