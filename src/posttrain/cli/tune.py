"""`posttrain tune`: search for values of recipe keys."""

from typing import Annotated

from typer import Argument, Option

from posttrain.cli.stages import one_file

_WORDS_HELP = (
    "Overrides of the study: `trials=30`, `workers=2`, `search.KEY.high=1e-4`, or `keys.KEY=value` for a recipe key of all "
    "trials."
)


_GROUP_HELP = (
    "Run only this group of a study with `groups`: its number, counted from 1, or its name. The best values of earlier groups "
    "apply if the study has run them."
)


def tune(
    file: Annotated[str, Argument(metavar="STUDY", help="A study file, or a name from `posttrain recipe list`.")],
    words: Annotated[list[str] | None, Argument(metavar="[key=value ...]", help=_WORDS_HELP)] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Show the trials and run nothing.")] = False,
    resume: Annotated[bool, Option("--resume", help="Resume the existing study.")] = False,
    group: Annotated[str | None, Option(metavar="GROUP", help=_GROUP_HELP)] = None,
) -> None:
    """Search for values of recipe keys. Every trial is a run, scored by a held-out metric.

    Examples:
    posttrain tune rlhf/tune_sft --dry-run
    posttrain tune rlhf/tune_sft trials=8 keys.model.path=packaged:smollm2-135m
    posttrain tune rlhf/tune_sft --resume workers=2
    posttrain tune ragen/search --group 2
    """
    from posttrain.plugins import require_module
    from posttrain.recipe.study_file import load_study
    from posttrain.terminal import new_console

    file, overrides = one_file("tune", [file, *(words or [])], "study", "rlhf/tune_sft", "--group")
    study, console = load_study(file, overrides), new_console()
    require_module("optuna", "posttrain tune")
    from posttrain.tune.run import run_study, show_study

    if dry_run:
        show_study(study, console, group)
    else:
        run_study(study, resume, console, group)
