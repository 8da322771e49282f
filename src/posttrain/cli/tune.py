"""`posttrain tune`: search for values of recipe keys."""

from typing import Annotated

import typer

from posttrain.cli.stages import split_words

_WORDS_HELP = (
    "Overrides of the study: `trials=30`, `workers=2`, `search.KEY.high=1e-4`, or `keys.KEY=value` for a recipe key of all "
    "trials."
)


def tune(
    file: Annotated[str, typer.Argument(metavar="STUDY", help="A study file, or a name from `posttrain recipe list`.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help=_WORDS_HELP)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the trials and run nothing.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the existing study.")] = False,
    group: Annotated[
        str | None,
        typer.Option(
            metavar="GROUP",
            help="Run only this group of a study with `groups`: its number, counted from 1, or its name. The best values of "
            "earlier groups apply if the study has run them.",
        ),
    ] = None,
) -> None:
    """Search for values of recipe keys. Every trial is a run, scored by a held-out metric.

    Examples:

    posttrain tune rlhf/tune_sft --dry-run

    posttrain tune rlhf/tune_sft trials=8 keys.model.path=packaged:smollm2-135m

    posttrain tune rlhf/tune_sft --resume workers=2

    posttrain tune ragen/search --group 2
    """
    from posttrain.errors import InputError
    from posttrain.plugins import require_module
    from posttrain.recipe.study_file import load_study
    from posttrain.terminal import new_console

    sources, overrides = split_words([file, *(words or [])], "--group")
    if not sources:
        raise InputError(f"{file} is not a study; name a study file first, for example rlhf/tune_sft")
    file, *others = sources
    if others:
        raise InputError(f"posttrain tune takes one file; remove {', '.join(others)}")
    study, console = load_study(file, overrides), new_console()
    require_module("optuna", "posttrain tune")
    if dry_run:
        from posttrain.tune.run import show_study

        show_study(study, console, group)
        return
    from posttrain.tune.run import run_study

    run_study(study, resume, console, group)
