"""`posttrain recipe`: the recipes that can be named, and the reference of all keys."""

from typing import Annotated

import typer
from typer import Argument, Option

_ABOUT = "`list` for the recipes that can be named; or a key or a section to explain."
_STAGE = "The stage whose keys are shown: rl, sft, reward, dpo, evaluate or generate."
_MARKDOWN = "All keys of all stages, as docs/reference/recipes.md."


def recipe(
    about: Annotated[str, Argument(metavar="[list | KEY]", help=_ABOUT)] = "",
    stage: Annotated[str, Option(help=_STAGE)] = "rl",
    markdown: Annotated[bool, Option("--markdown", help=_MARKDOWN)] = False,
) -> None:
    """Show the keys of a recipe: what they may be, their default, and what they do.

    Examples:
    posttrain recipe list
    posttrain recipe
    posttrain recipe rollout.sampling
    posttrain recipe credit --stage rl
    """
    from posttrain.recipe.pages import list_recipes, markdown_reference, show_keys
    from posttrain.terminal import new_console

    if markdown:
        typer.echo(markdown_reference(), nl=False)
    elif about == "list":
        list_recipes(new_console())
    else:
        show_keys(about, stage, new_console())
