"""`posttrain rl`."""

from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli import stages


def rl(
    words: Annotated[list[str] | None, typer.Argument(metavar=stages.WORDS, help=stages.WORDS_HELP)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run and the memory it takes.")] = False,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with the run in this directory.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete a run of the same name first.")] = False,
) -> None:
    """Train a policy by reinforcement learning in an environment.

    Examples:

    posttrain rl environment.type=bandit

    posttrain rl recipes/ragen/sokoban.yaml model.path=packaged:smollm2-135m --steps 20

    posttrain rl environment.type=frozen_lake --dry-run

    posttrain rl --resume runs/run steps=200
    """
    stages.run("rl", words or [], dry_run, resume, overwrite)
