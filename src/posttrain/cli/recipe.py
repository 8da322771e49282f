"""`posttrain recipe`: the recipes that can be named, and the reference of all keys."""

from typing import Annotated

import typer


def recipe(
    about: Annotated[
        str,
        typer.Argument(
            metavar="[list | KEY | RECIPE]",
            help="`list` for the recipes that can be named; or a key, a section, a recipe file or a recipe's name to explain.",
        ),
    ] = "",
    stage: Annotated[
        str, typer.Option(help="The stage whose keys are shown: rl, sft, reward, dpo, evaluate or generate.")
    ] = "rl",
    markdown: Annotated[
        bool, typer.Option("--markdown", help="All keys of all stages, as docs/reference/recipes.md.")
    ] = False,
) -> None:
    """Show the keys of a recipe: what they may be, their default, and what they do.

    Examples:

    posttrain recipe list

    posttrain recipe

    posttrain recipe rollout.sampling

    posttrain recipe credit --stage rl

    posttrain recipe ragen/bandit
    """
    from posttrain.recipe.catalogue import recipe_names
    from posttrain.recipe.pages import list_recipes, markdown_reference, show_keys, show_recipe
    from posttrain.terminal import new_console

    if markdown:
        typer.echo(markdown_reference(), nl=False)
    elif about == "list":
        list_recipes(new_console())
    elif about.endswith((".yaml", ".yml")) or about in recipe_names():
        show_recipe(about, new_console())
    else:
        show_keys(about, stage, new_console())
