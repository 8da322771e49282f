"""`posttrain cluster`: plan runs on several machines."""

from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli.stages import OPEN, WORDS, WORDS_HELP, split_words

if TYPE_CHECKING:
    from posttrain.planning.work import Episodes, Tokens
    from posttrain.recipe.stages import Recipe

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="Plan runs on a cluster.")


@app.command(context_settings=OPEN)
def plan(
    words: Annotated[list[str] | None, typer.Argument(metavar=WORDS, help=WORDS_HELP)] = None,
    on: Annotated[str | None, typer.Option(metavar="DEVICE", help="Device type of the planned cluster.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of machines of the planned cluster.")] = None,
    devices: Annotated[int | None, typer.Option(help="GPUs per machine.")] = None,
    sizes: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Use the sizes of this model: a path or a known name.")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="P,A,L[,O]",
            help="Tokens of an episode: prompt, mean answer, longest answer, observations.",
        ),
    ] = None,
) -> None:
    """Show the placement of all workers, their memory, the idle time of GPUs, and settings that reduce it.

    The cluster is the one that `--on`, `--nodes` and `--devices` describe. Without these options it is the running cluster
    of `hardware.ray`, or else this machine.

    Examples:

    posttrain cluster plan recipes/ragen/bandit.yaml hardware.ray=auto

    posttrain cluster plan recipes/rlhf/ppo.yaml recipes/rlhf/ppo_8gpu.yaml --sizes Qwen3-4B --on h200 --devices 8
    """
    from rich.console import Console

    from posttrain.planning.cluster import show_placement
    from posttrain.planning.devices import device_of
    from posttrain.planning.model_sizes import model_sizes
    from posttrain.planning.workers import described, living, placed_recipe

    recipe = placed_recipe(_recipe(*split_words(words or [])))
    device = None if on is None else device_of(on)
    address = recipe.hardware.ray
    if address is not None and (on, nodes, devices) == (None, None, None):
        from posttrain.distributed.ray.connection import connected

        with connected(address, recipe.hardware) as ray:
            machines, device = living(ray.nodes())
    elif (on, nodes, devices) == (None, None, None):
        machines = _here()
    else:
        machines = described(nodes or 1, 8 if devices is None else devices, device)
    known = model_sizes(sizes or recipe.model.path)
    show_placement(recipe, machines, device, known, Console(), _episodes(recipe, lengths), _rows(recipe, lengths))


def _recipe(sources: list[str], overrides: list[str]) -> "Recipe":
    """The recipe, for the stage that its files name."""
    from posttrain.recipe.compose import load_recipe
    from posttrain.recipe.sources import read_file

    stages = [stage for source in sources if (stage := read_file(source).values.get("stage"))]
    return load_recipe(sources, overrides, str(stages[-1]) if stages else "rl")


def _here() -> list:
    import os

    from posttrain.planning.workers import Node

    return [Node("this machine", float(len(os.sched_getaffinity(0))), 0)]


def _numbers(lengths: str) -> list[float]:
    from posttrain.errors import InputError

    try:
        numbers = [float(part) for part in lengths.split(",")]
    except ValueError:
        numbers = []
    if not 2 <= len(numbers) <= 4 or min(numbers) < 0:
        raise InputError(
            f"--lengths {lengths}: give two to four numbers, such as 208,127,227: tokens of the prompt, the mean answer, the "
            "longest answer, and the observations"
        )
    return numbers


def _episodes(recipe: "Recipe", lengths: str | None) -> "Episodes | None":
    from posttrain.planning.work import Episodes
    from posttrain.recipe.stages import RlRecipe

    if lengths is None or not isinstance(recipe, RlRecipe):
        return None
    prompt, answer, *rest = _numbers(lengths)
    rollout = recipe.rollout
    longest, observed = (*rest, *[answer, 0.0][len(rest) :])
    return Episodes(rollout.groups_per_step, rollout.episodes_per_group, prompt, answer, longest, observed)


def _rows(recipe: "Recipe", lengths: str | None) -> "Tokens | None":
    from posttrain.planning.work import rows_of
    from posttrain.recipe.stages import DpoRecipe, RewardRecipe, SftRecipe

    if lengths is None or not isinstance(recipe, SftRecipe | DpoRecipe | RewardRecipe):
        return None
    prompt, answer = _numbers(lengths)[:2]
    count = recipe.rows_per_update * (1 if isinstance(recipe, SftRecipe) else 2)
    return rows_of(count, prompt + answer, 0 if isinstance(recipe, RewardRecipe) else answer)
