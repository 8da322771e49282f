"""`posttrain sft`."""

from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli import stages


def sft(
    words: Annotated[list[str] | None, typer.Argument(metavar=stages.WORDS, help=stages.WORDS_HELP)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run and the memory it takes.")] = False,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with the run in this directory.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete a run of the same name first.")] = False,
) -> None:
    """Train a policy on the traces of an environment's expert.

    Examples:

    posttrain sft environment.type=sokoban name=warm

    posttrain sft environment.type=bandit data.expert=random epochs=2

    posttrain sft --resume runs/warm
    """
    stages.run("sft", words or [], dry_run, resume, overwrite)
