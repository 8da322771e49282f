"""`posttrain pipeline`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli.stages import On, planned_device, split_words

if TYPE_CHECKING:
    from posttrain.recipe.memory import ModelSizes

_WORDS_HELP = (
    "The pipeline's file, then overrides: `name=value`, `runs=value`, `common.KEY=value` beneath every stage, "
    "`stages.NAME.KEY=value` for one stage."
)


def pipeline(
    file: Annotated[Path, typer.Argument(metavar="PIPELINE.yaml", help="The pipeline.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help=_WORDS_HELP)] = None,
    only: Annotated[str | None, typer.Option(metavar="STAGE", help="Run this stage alone.")] = None,
    start_from: Annotated[
        str | None, typer.Option("--from", metavar="STAGE", help="Run this stage and those after it.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say which stages would run, and show what.")] = False,
    on: On = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Run finished stages again.")] = False,
) -> None:
    """Run stages in order, each from the model of an earlier one; what is finished and unchanged is not run again.

    Examples:

    posttrain pipeline recipes/demo/pipeline.yaml

    posttrain pipeline recipes/demo/pipeline.yaml --dry-run

    posttrain pipeline recipes/demo/pipeline.yaml --from rl stages.rl.steps=50
    """
    from rich.console import Console

    from posttrain.errors import InputError
    from posttrain.recipe.pipeline import load_pipeline

    device = planned_device(dry_run, on)
    sources, overrides = split_words(words or [])
    if sources:
        raise InputError(f"posttrain pipeline takes one file; leave out {', '.join(sources)}")
    loaded, console = load_pipeline(str(file), overrides), Console()
    if dry_run:
        from posttrain.models.sizes import model_sizes
        from posttrain.recipe.plan import show_plan
        from posttrain.training.pipeline_plan import chosen_stages, planned

        for line in planned(loaded, only, start_from, overwrite):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        chosen = chosen_stages(loaded, only, start_from)
        start: dict[str, ModelSizes | None] = {}
        for stage in loaded.stages:
            # A model that an earlier stage will export has the sizes of the one that stage started from.
            start[stage.name] = start[stage.upstream] if stage.upstream else model_sizes(stage.recipe.model.path)
            if stage in chosen:
                console.rule(f"stage {stage.name}")
                show_plan(stage.recipe, start[stage.name], console, device)
        return
    from posttrain.training.pipeline import run_pipeline

    run_pipeline(loaded, only=only, start_from=start_from, overwrite=overwrite, console=console)
