"""`posttrain env`: list, play, check and audit environments."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from posttrain.environments.audit import Audit
    from posttrain.environments.protocol import Environment, Message
    from posttrain.recipe.components import EnvironmentRecipe

app = typer.Typer(help="List, play, check and audit environments.", no_args_is_help=True)

_SECONDS = 300.0
"""Time limit of the audit of one environment."""
_WORDS_HELP = (
    "A built-in name, `module:Class` or `path/to/file.py`, and keys of the environment, "
    "for example `frozen_lake slippery=false size=5`."
)
_TYPES_HELP = f"{_WORDS_HELP} Default: all environments that need no keys."
_Types = Annotated[list[str] | None, Argument(metavar="[TYPE ...] [key=value ...]", help=_TYPES_HELP)]


@app.command("list")
def list_environments(
    type_name: Annotated[str | None, Argument(metavar="[TYPE]", help="List the tasks of this environment.")] = None,
    seeds: Annotated[int, Option(help="Number of seeds for the baseline policies.", min=1)] = 100,
) -> None:
    """List the environments with the success of the random and the optimal policy."""
    from rich.table import Table

    from posttrain.errors import PosttrainError
    from posttrain.recipe.components import environment_class, environment_names
    from posttrain.terminal import new_console

    if type_name is not None:
        for words in _variants(type_name, []):
            typer.echo(" ".join(words))
        return
    headings = ("environment", "turns", "description", "random", "optimal")
    table = Table(*headings, caption=f"success on seeds 0 to {seeds - 1}")
    for name in environment_names():
        try:
            environment = environment_class(name)
            recipe = environment.Recipe() if environment.self_contained else environment.Recipe.model_construct()
            baselines = environment.baselines(recipe, range(seeds)) if environment.self_contained else {}
        except PosttrainError as error:
            table.add_row(name, "-", f"unavailable: {error}", "-", "-")
            continue
        policies = [baselines.get(policy) for policy in ("random", "optimal")]
        rates = [f"{100 * one.success:.1f} %" if one is not None else "-" for one in policies]
        table.add_row(name, str(recipe.max_turns), (environment.__doc__ or "").strip().splitlines()[0], *rates)
    new_console().print(table)


@app.command()
def play(
    words: Annotated[list[str], Argument(metavar="TYPE [key=value ...]", help=_WORDS_HELP)],
    seed: Annotated[int, Option(help="Seed of the task.", min=0)] = 0,
) -> None:
    """Play an environment in the terminal. A bare action such as `up` is wrapped in the answer format."""
    from posttrain.environments.protocol import ProtocolError
    from posttrain.errors import InputError, RunError
    from posttrain.recipe.components import environment_class

    types, overrides = _split(words)
    if len(types) != 1:
        raise InputError(f"env play takes one environment, not {len(types)}; for example `posttrain env play sokoban`")
    recipe = environment_of(types[0], overrides)
    try:
        _play(environment_class(recipe.type)(recipe), seed)
    except (EOFError, KeyboardInterrupt):
        typer.echo("\nstopped")
    except ProtocolError as error:
        raise RunError(f"{recipe.type}: {error}; correct the environment") from error


@app.command()
def validate(
    words: _Types = None,
    seeds: Annotated[int | None, Option(help="Seeds to check. Default: 100, or every row of a file.", min=1)] = None,
) -> None:
    """Check without a model that episodes repeat, end and are scored, and that a reference solution earns full reward.

    The first checks do not use code of the environment. The last check is its method `validate`.
    """
    from collections import Counter

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
            count = (seeds or 100) if rows is None else min(seeds or len(rows), len(rows))
            open_points, wrong = check_environment(recipe, range(min(count, 100))), []
            # A wrong row does not hide those after it.
            for checked in [range(count)] if rows is None else [range(row, row + 1) for row in range(count)]:
                try:
                    environment.validate(recipe, checked)
                except AssertionError as error:
                    wrong.append(str(error))
                except NotImplementedError:
                    open_points.append("not checked: a reference solution (no `validate`)")
                    break
            for line in environment.check_tasks(recipe, range(0), []):
                typer.echo(f"{recipe.type}: {line}")
            if wrong:
                more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
                failures.append(f"{recipe.type}: {'; '.join(wrong[:5])}{more}")
            valid = f"{count} seeds" if rows is None else f"{count - len(wrong)} of {len(rows)} tasks"
            kinds = Counter(row.kind for row in rows or () if row.kind)
            valid += f" ({', '.join(f'{kind} {number}' for kind, number in kinds.items())})" if kinds else ""
            typer.echo("\n  ".join([f"{recipe.type}: valid on {valid}", *open_points]))
        except AssertionError as error:
            failures.append(f"{recipe.type}: {error}")
    if failures:
        raise RunError("; ".join(failures) + "; correct the environment")


_PLAYER = "One of these policies; may be given several times. Default: all."


@app.command()
def audit(
    words: _Types = None,
    every: Annotated[bool, Option("--all", help="Audit every task that `env list TYPE` shows.")] = False,
    first: Annotated[int, Option(help="First seed.", min=0)] = 0,
    seeds: Annotated[int, Option(help="Number of seeds.", min=1)] = 5,
    player: Annotated[list[str] | None, Option(help=_PLAYER)] = None,
    show: Annotated[bool, Option(help="Print the episodes.")] = False,
    out: Annotated[Path | None, Option(help="Append one line of JSON per environment to this file.")] = None,
) -> None:
    """Play environments with policies that need no model, and report defects.

    They are nothing (an empty answer), random, echo (the newest message), repeat (the prompt), injection (a claim that the
    task is solved) and oracle (the environment's expert). Each plays every seed twice, and once more in another process. The
    audit checks that a seed repeats its episode, rewards without work, the oracle's success, exceptions, time, answers in
    prompts, and the protocol. Each finding has a command that reproduces it. Exit status 1: there are defects.
    """
    from posttrain.environments.audit import AuditProcesses, require_sound
    from posttrain.environments.audit import audit as audited
    from posttrain.environments.players import PLAYERS
    from posttrain.errors import InputError
    from posttrain.recipe.components import environment_class, environment_classes

    types, overrides = _split(words or [])
    players = player or list(PLAYERS)
    if unknown := sorted(set(players) - set(PLAYERS)):
        raise InputError(f"--player {unknown[0]}: use {', '.join(PLAYERS)}")
    whole = [name for name, environment in environment_classes().items() if every or environment.self_contained]
    audits = []
    wanted = [one for name in types or whole for one in (_variants(name, overrides) if every else [[name, *overrides]])]
    with AuditProcesses(_SECONDS) as processes:
        for name, *keys in wanted:
            recipe = environment_of(name, keys)
            rows = environment_class(recipe.type).task_rows(recipe)
            chosen = range(first, first + (seeds if rows is None else min(seeds, max(1, len(rows) - first))))
            if show:
                for each in players:
                    _show_episode(recipe, first, each)
            audits.append(audited(shlex.join([name, *keys]), recipe, chosen, players, processes))
            _show_audit(audits[-1])
            if out is not None:
                with out.open("a", encoding="utf-8") as file:
                    file.write(audits[-1].as_json() + "\n")
    require_sound(audits)


def _variants(name: str, overrides: list[str]) -> list[list[str]]:
    """The words of every complete task of an environment."""
    from posttrain.environments.audit import overrides_of
    from posttrain.recipe.components import environment_class

    return [[name, *overrides_of(keys), *overrides] for keys in environment_class(name).variants()]


def _show_audit(audit: "Audit") -> None:
    typer.echo(typer.style(audit.name, bold=True) + ("" if audit.findings else ": no findings"))
    for name, score in audit.players.items():
        success = "" if score.successes is None else f"success {score.successes} of {score.n}, "
        rewards = f"rewards {score.lowest:g} to {score.highest:g}"
        typer.echo(f"  {name:9} {success}mean return {score.mean_return:.3g}, {rewards}")
    reset, step = (float(f"{ms:.2g}") for ms in (audit.reset_ms, audit.step_ms))
    typer.echo(f"  reset {reset:g} ms, step {step:g} ms, at most {audit.turns} step{'s' if audit.turns > 1 else ''}")
    for finding in audit.findings:
        kind = typer.style("defect", fg="red") if finding.defect else "note"
        typer.echo(f"  {kind}, {finding.check}: {finding.text}\n    {finding.command}")


def _show_episode(recipe: "EnvironmentRecipe", seed: int, player: str) -> None:
    from posttrain.environments.check import step_limit
    from posttrain.environments.players import PLAYERS, play_episode
    from posttrain.recipe.components import environment_class

    played = play_episode(environment_class(recipe.type), recipe, seed, PLAYERS[player], step_limit(recipe, 20))
    typer.echo(typer.style(f"\n{player} on seed {seed}", underline=True))
    if played.first is not None:
        _show(played.first.messages)
    for answer, step in zip(played.answers, played.steps, strict=False):
        _show([{"role": player, "content": answer}, *step.messages])
        typer.echo(f"reward {step.reward:+.3g}, info {step.info}")
    if played.error is not None:
        typer.echo(f"{played.where} raised {type(played.error).__name__}: {played.error}")


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Types and overrides. A word with `=` is an override."""
    return [word for word in words if "=" not in word], [word.removeprefix("--") for word in words if "=" in word]


def environment_of(type_name: str, overrides: list[str]) -> "EnvironmentRecipe":
    """The recipe of an environment by its type and `key=value` words; `InputError` as for a whole recipe."""
    import json

    from posttrain.recipe.compose import load_recipe

    # Load a whole recipe, so that keys are validated as everywhere else.
    words = [f"environment.type={json.dumps(type_name)}", *(f"environment.{word}" for word in overrides)]
    return load_recipe([], words, "rl").environment  # type: ignore[attr-defined]


def _play(environment: "Environment", seed: int) -> None:
    import json

    from posttrain.environments.game import FormatRecipe
    from posttrain.environments.protocol import require_observation, require_step

    form = getattr(environment.recipe, "format", None)
    first = require_observation(environment.reset(seed))
    for tool in first.tools:
        typer.echo(f"tool {json.dumps(tool['function'])}")
    _show(first.messages)
    total, turns = 0.0, 0
    while True:
        text = input("\nyour answer> ").strip()
        if not text:
            continue
        if "<" not in text and isinstance(form, FormatRecipe):  # a bare action
            text = form.render([text], "Played by hand.")
        step = require_step(environment.step(text))
        total, turns = total + step.reward, turns + 1
        _show(step.messages)
        typer.echo(f"reward {step.reward:+.2f}, so far {total:+.2f}")
        if step.terminated or step.truncated:
            result = {True: "success", False: "no success", None: "over"}[step.info.get("success")]
            why = "the task ended" if step.terminated else "no turns are left"
            typer.echo(f"\n{result}: {why} after {turns} turn{'s' if turns > 1 else ''}, return {total:+.2f}")
            return


def _show(messages: "list[Message]") -> None:
    from posttrain.images import readable

    for message in messages:
        typer.echo(f"\n{typer.style(message['role'], bold=True)}\n{readable(message['content'])}")
