"""`posttrain runs`: disk usage of runs, and how to reduce it."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from posttrain.runs.storage import Usage

app = typer.Typer(help="List runs with their sizes, and free what ended runs no longer need.", no_args_is_help=True)

_Runs = Annotated[
    list[Path] | None, Argument(metavar="[FOLDER ...]", help="Runs, or folders that hold runs. Default: runs.")
]


@app.command("list")
def list_runs(folders: _Runs = None) -> None:
    """List runs with their stage, progress, verdict and size, what `posttrain runs clean` would free, and runs that can go.

    Examples:
    posttrain runs list
    posttrain runs list runs/demo
    """
    from rich.table import Table
    from rich.text import Text

    from posttrain.runs.storage import needed_runs, size_text
    from posttrain.runs.tables import NOTHING, WORSE
    from posttrain.terminal import new_console

    used = _usages(folders)
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "stage", "verdict"):
        table.add_column(heading, overflow="fold")
    for heading in ("steps", "size", "to free"):
        table.add_column(heading, justify="right", overflow="fold")
    for usage in used:
        values = {} if usage.problem else usage.run.recipe_values()
        whole = "" if usage.ended or values.get("steps") is None else f" of {values['steps']}"
        table.add_row(
            Text(str(usage.run.path)),
            Text(usage.problem) if usage.problem else str(values.get("stage", "?")),
            usage.verdict or "–",
            "–" if usage.problem else f"{usage.step}{whole}",
            size_text(usage.total - usage.shared),
            size_text(usage.freed) if usage.ended and usage.freed else "–",
        )
    new_console(highlight=False).print(table)
    freed = sum(usage.freed for usage in used if usage.ended)
    alone = sum(usage.total - usage.shared for usage in used)
    typer.echo(f"{_runs(len(used))}, {size_text(alone)}; {size_text(freed)} to free")
    if shared := max((usage.shared for usage in used), default=0):
        typer.echo(
            f"models up to {size_text(shared)} are shared with the run or cache that they come from, and not counted"
        )
    gone = [usage for usage in used if usage.ended and usage.verdict in (NOTHING, WORSE)]
    needed = needed_runs([usage.run for usage in gone])
    if gone := [usage for usage in gone if usage.run.path not in needed]:
        size = size_text(sum(usage.total - usage.shared for usage in gone))
        typer.echo(f"{_runs(len(gone))} of {size} did not improve; delete what you do not need:")
        typer.echo(f"rm -r {' '.join(shlex.quote(str(usage.run.path)) for usage in gone)}")


@app.command()
def clean(folders: _Runs = None, yes: Annotated[bool, Option("--yes", help="Do not ask.")] = False) -> None:
    """Delete the training state of runs that have ended, and store equal weights once. Asks first.

    Models, the policies of all checkpoints, metrics, episodes and reports are kept. A run without its training state
    cannot be continued.

    Examples:
    posttrain runs clean
    posttrain runs clean runs/first --yes
    """
    from posttrain.errors import InputError
    from posttrain.runs.storage import free_space, size_text

    used = [usage for usage in _usages(folders) if usage.ended and usage.freed]
    for usage in used:
        typer.echo(f"{usage.run.path}: {size_text(usage.freed)} of {size_text(usage.total)}")
    if not used:
        typer.echo("nothing to free: no run that has ended has training state or equal weights")
        return
    try:
        agreed = yes or typer.confirm(f"free {size_text(sum(usage.freed for usage in used))} of {_runs(len(used))}?")
    except (typer.Abort, RuntimeError) as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise
        typer.echo(err=True)
        raise InputError("standard input has no answer to the question; pass --yes to free the space") from error
    if not agreed:
        typer.echo("nothing was deleted")
        return
    for usage in used:
        try:
            with usage.run.lock():
                free_space(usage.run)
        except InputError as error:
            typer.echo(f"skipped: {error}")
    typer.echo("done")


def _usages(folders: list[Path] | None) -> "list[Usage]":
    """The usage of all runs in `folders`. InputError for a folder that does not exist or has no runs."""
    from posttrain.errors import InputError
    from posttrain.runs.directory import RunDirectory
    from posttrain.runs.storage import runs_in, usage_of

    runs: dict[Path, RunDirectory] = {}
    for folder in folders or [Path("runs")]:
        inside = runs_in(folder) if folder.is_dir() else []
        if not inside:
            raise InputError(f"there is no run in {folder}; name a run, or a folder that holds runs")
        runs |= {run.path.resolve(): run for run in inside}
    return [usage_of(run) for run in runs.values()]


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
