"""`posttrain evaluate`."""

from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli import stages


def evaluate(
    words: Annotated[list[str] | None, typer.Argument(metavar=stages.WORDS, help=stages.WORDS_HELP)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run and the memory it takes.")] = False,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with the run in this directory.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete a run of the same name first.")] = False,
) -> None:
    """Evaluate a model in an environment on held-out seeds.

    Examples:

    posttrain evaluate environment.type=sokoban name=before

    posttrain evaluate environment.type=bandit model.path=runs/run/model evaluation.sampling.temperature=0.7
    """
    stages.run("evaluate", words or [], dry_run, resume, overwrite)
