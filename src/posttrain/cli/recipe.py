"""`posttrain recipe`: the reference of all keys."""

from typing import Annotated

import typer


def recipe(
    about: Annotated[
        str, typer.Argument(metavar="[KEY | RECIPE.yaml]", help="A key, a section, or a recipe file to explain.")
    ] = "",
    stage: Annotated[
        str, typer.Option(help="The stage whose keys are shown: rl, sft, reward, dpo, evaluate or generate.")
    ] = "rl",
    markdown: Annotated[bool, typer.Option("--markdown", help="All keys of all stages, as docs/recipes.md.")] = False,
) -> None:
    """Show the keys of a recipe: what they may be, their default, and what they do.

    Examples:

    posttrain recipe

    posttrain recipe rollout.sampling

    posttrain recipe credit --stage rl

    posttrain recipe recipes/ragen/bandit.yaml
    """
    from rich.console import Console

    from posttrain.recipe.pages import markdown_reference, show_keys, show_recipe

    if markdown:
        typer.echo(markdown_reference(), nl=False)
    elif about.endswith((".yaml", ".yml")):
        show_recipe(about, Console())
    else:
        show_keys(about, stage, Console())
