"""`posttrain env`: list, play and check environments."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from posttrain.environments.protocol import Environment, Message, Step
    from posttrain.recipe.components import EnvironmentRecipe

app = typer.Typer(help="List, play and check environments.", no_args_is_help=True)

_TYPES = "[TYPE ...] [key=value ...]"
_WORDS_HELP = (
    "A built-in name, `module:Class` or `path/to/file.py`, and keys of the environment, "
    "for example `frozen_lake slippery=false size=5`."
)


@app.command("list")
def list_environments(
    seeds: Annotated[int, typer.Option(help="Number of seeds for the baseline policies.", min=1)] = 100,
) -> None:
    """List the environments with the success of the random and the optimal policy."""
    from rich.console import Console
    from rich.table import Table

    from posttrain.errors import PosttrainError
    from posttrain.recipe.components import environment_class, environment_names

    table = Table(
        "environment", "turns", "what it is", "random", "optimal", caption=f"success on seeds 0 to {seeds - 1}"
    )
    for name in environment_names():
        try:
            environment = environment_class(name)
            recipe = environment.Recipe() if environment.self_contained else environment.Recipe.model_construct()
            baselines = environment.baselines(recipe, range(seeds)) if environment.self_contained else {}
        except PosttrainError as error:
            table.add_row(name, "-", f"unavailable: {error}", "-", "-")
            continue
        rates = [
            f"{100 * baselines[policy].success:.1f} %" if policy in baselines else "-"
            for policy in ("random", "optimal")
        ]
        table.add_row(name, str(recipe.max_turns), (environment.__doc__ or "").strip().splitlines()[0], *rates)
    Console().print(table)


@app.command()
def play(
    words: Annotated[list[str], typer.Argument(metavar="TYPE [key=value ...]", help=_WORDS_HELP)],
    seed: Annotated[int, typer.Option(help="Seed of the task.", min=0)] = 0,
) -> None:
    """Play an environment in the terminal. A bare action such as `up` is wrapped in the answer format."""
    from posttrain.errors import InputError
    from posttrain.recipe.components import environment_class

    types, overrides = _split(words)
    if len(types) != 1:
        raise InputError(f"env play takes one environment, not {len(types)}; for example `posttrain env play sokoban`")
    recipe = environment_of(types[0], overrides)
    environment = environment_class(recipe.type)(recipe)
    try:
        _play(environment, seed)
    except (EOFError, KeyboardInterrupt):
        typer.echo("\nstopped")


@app.command()
def validate(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar=_TYPES, help=f"{_WORDS_HELP} Default: all environments that need no keys."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Seeds to check.", min=1)] = 100,
) -> None:
    """Check without a model that episodes repeat, end and are scored, and that a reference solution earns full reward.

    The first part needs no help from the environment. The second one is its method `validate`.
    """
    from posttrain.environments.check import check_environment
    from posttrain.errors import RunError
    from posttrain.recipe.components import environment_class, environment_classes

    types, overrides = _split(words or [])
    whole = [name for name, environment in environment_classes().items() if environment.self_contained]
    recipes = [environment_of(name, overrides) for name in types or whole]
    failures = []
    for recipe in recipes:
        try:
            environment = environment_class(recipe.type)
            rows = environment.task_rows(recipe)
            open_points = check_environment(recipe, range(seeds if rows is None else min(seeds, len(rows))))
            try:
                environment.validate(recipe, range(seeds))
            except NotImplementedError:
                open_points.append("it has no `validate`, so no reference solution is checked")
            for line in environment.check_tasks(recipe, range(0), []):
                typer.echo(f"{recipe.type}: {line}")
            valid = f"{seeds} seeds" if rows is None else f"{min(seeds, len(rows))} of {len(rows)} tasks"
            typer.echo(f"{recipe.type}: {'; '.join([f'valid on {valid}', *open_points])}")
        except AssertionError as error:
            failures.append(f"{recipe.type}: {error}")
    if failures:
        raise RunError("; ".join(failures) + "; correct the environment")


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Types and overrides. A word with `=` is an override."""
    return [word for word in words if "=" not in word], [word.removeprefix("--") for word in words if "=" in word]


def environment_of(type_name: str, overrides: list[str]) -> "EnvironmentRecipe":
    """The recipe of an environment by its type and `key=value` words; `InputError` as for a whole recipe."""
    import json

    from posttrain.recipe.compose import load_recipe

    # Load a whole recipe, so that keys are validated as everywhere else.
    words = [f"environment.type={json.dumps(type_name)}", *(f"environment.{word}" for word in overrides)]
    recipe = load_recipe([], words, "rl")
    assert recipe.stage == "rl"
    return recipe.environment


def _play(environment: "Environment", seed: int) -> None:
    _show(environment.reset(seed).messages)
    total, turns = 0.0, 0
    while True:
        text = input("\nyour answer> ").strip()
        if not text:
            continue
        step = environment.step(_answer(environment, text))
        total, turns = total + step.reward, turns + 1
        _show(step.messages)
        typer.echo(f"reward {step.reward:+.2f}, so far {total:+.2f}")
        if step.terminated or step.truncated:
            typer.echo(_verdict(step, turns, total))
            return


def _answer(environment: "Environment", text: str) -> str:
    """`text` unchanged if it has tags, otherwise in the environment's answer format, if any."""
    from posttrain.environments.game import FormatRecipe

    form = getattr(environment.recipe, "format", None)
    if "<" in text or not isinstance(form, FormatRecipe):
        return text
    return form.render([text], "Played by hand.")


def _verdict(step: "Step", turns: int, total: float) -> str:
    result = {True: "success", False: "no success", None: "over"}[step.info.get("success")]
    why = "the task ended" if step.terminated else "no turns are left"
    return f"\n{result}: {why} after {turns} turn{'s' if turns > 1 else ''}, return {total:+.2f}"


def _show(messages: "list[Message]") -> None:
    for message in messages:
        typer.echo(f"\n{typer.style(message['role'], bold=True)}\n{message['content']}")
