"""The commands about runs: `posttrain episodes`, `plot`, `report`, `compare` and `view` read them, `export` publishes their models,
and `posttrain runs` reduces their disk usage."""

import shlex
from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from posttrain.runs.storage import Usage


def only_looking(command: Callable[..., None]) -> Callable[..., None]:
    """Run `command` without importing code that the run directory names, because the run may come from someone else."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        from posttrain.recipe.components import looking

        with looking():
            command(*args, **kwargs)

    return wrapped


_SPLIT = (
    "Training episodes, held-out episodes of the learning curve, or those of the final table. `audit`: the tasks on which the "
    "reward and the audit differ most, by default of the last evaluation."
)


@only_looking
def episodes(
    run: Annotated[Path, Argument(metavar="RUN", help="Directory of a run, for example runs/run.")],
    step: Annotated[int | None, Option(help="Step to show. Default: list the steps that have episodes.", min=0)] = None,
    split: Annotated[Literal["train", "evaluation", "final", "audit"], Option(help=_SPLIT)] = "train",
    group: Annotated[int | None, Option(help="Show only this group.")] = None,
    episode: Annotated[int | None, Option(help="Show only the episode with this index in its group.")] = None,
    tokens: Annotated[bool, Option("--tokens", help="Show sampled tokens, colored by advantage.")] = False,
    limit: Annotated[int, Option(help="Maximum number of episodes to show.", min=1)] = 8,
) -> None:
    """Show the episodes of a run: the conversation, and reward, stop reason and advantages of each turn.

    With `unit_credit`, answers are shown unit by unit, with the credit, tokens and text of each unit.

    Examples:
    posttrain episodes runs/run
    posttrain episodes runs/run --step 20 --group 0
    posttrain episodes runs/run --step 20 --group 0 --episode 1 --tokens
    """
    from posttrain.errors import InputError
    from posttrain.rollout.store import episodes_file, read_episodes, stored_steps
    from posttrain.runs.directory import RunDirectory
    from posttrain.runs.tables import audit_table
    from posttrain.terminal import new_console
    from posttrain.view.episodes import token_decoder, unit_credit_recipe
    from posttrain.view.terminal import view_episode, view_steps

    directory, console = RunDirectory.open(run), new_console(highlight=False)
    if split == "audit":
        files = directory.path.glob("audit/step_[0-9]*[0-9].json")
        audited = sorted(int(file.stem.removeprefix("step_")) for file in files)
        if not audited or step not in (None, *audited):
            of_step = "" if step is None else f" of step {step}"
            raise InputError(f"{run} has no audit{of_step}; audited steps: {audited or 'none'}")
        table = audit_table(directory.path, audited[-1] if step is None else step)
        console.print(table)
        console.print(table.note)
        return
    if step is None:
        steps = list(stored_steps(directory.episodes))
        if not steps and (stage := directory.load_recipe().stage) in ("sft", "reward", "dpo"):
            raise InputError(
                f"{run} is of stage {stage} and has no episodes; `posttrain data inspect FILE` shows its rows"
            )
        if not steps:
            raise InputError(f"{directory.episodes} contains no episodes yet; wait for the first step")
        console.print(view_steps(steps))
        return
    stored = read_episodes(episodes_file(directory.episodes, step, split))
    played, advantages, units = stored.episodes, stored.advantages, stored.units
    wanted = [group in (None, one.group) and episode in (None, one.index) for one in played]
    chosen = [number for number, shown in enumerate(wanted) if shown]
    if not chosen:
        groups = sorted({one.group for one in played})
        raise InputError(
            f"step {step} has no such {split} episode; change --group or --episode (its groups are {groups})"
        )
    if tokens and any(played[number].turns and not played[number].streams for number in chosen):
        raise InputError("--tokens: token ids of remote models are unknown; remove --tokens")
    in_units = any(units[number] is not None for number in chosen[:limit])
    decode = token_decoder(directory) if tokens or in_units else None
    credited = unit_credit_recipe(directory) if in_units else None
    for number in chosen[:limit]:
        advantage = advantages.values[number] if advantages is not None else None
        console.print(view_episode(played[number], advantage, decode, tokens, units[number], credited))
    if len(chosen) > limit:
        console.print(f"and {len(chosen) - limit} more; show them with --limit {len(chosen)}")


class FigureFormat(StrEnum):
    """A format of figures."""

    PNG = "png"
    SVG = "svg"


_RUNS = "Run directories, TensorBoard event files, or directories of them."
_FOLDER = "Output directory. Default: RUN/plots, or `plots` in the working directory for several runs."
_FORMATS = "png (the default) or svg. May be given twice."


@only_looking
def plot(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help=_RUNS)],
    out: Annotated[Path | None, Option(help=_FOLDER)] = None,
    formats: Annotated[list[FigureFormat] | None, Option("--format", help=_FORMATS, show_default=False)] = None,
    metrics: Annotated[
        list[str] | None,
        Option("--metric", metavar="KEY", help="A metric of metrics.jsonl. May be given several times."),
    ] = None,
    until: Annotated[int | None, Option(metavar="STEP", help="Leave out later steps.", min=0)] = None,
) -> None:
    """Plot the metrics of runs. One run: all of its plots. Several runs: one figure per metric. Runs may still be training.

    Runs that differ only in `seed` become one curve: the mean with its 95% interval over seeds. Runs that evaluated
    checkpoints of one training run become a table of scores by checkpoint, with figures.

    Examples:
    posttrain plot runs/run
    posttrain plot runs/run --until 20
    posttrain plot runs/ppo runs/grpo-1 runs/grpo-2 runs/grpo-3 --out figures --format svg
    posttrain plot runs/a runs/b --metric policy/mismatch
    """
    from posttrain.plugins import require_module

    require_module("matplotlib", "posttrain plot")
    from posttrain.figures.draw import FORMATS
    from posttrain.figures.plots import plot_files

    forms = [form for form in FORMATS if FigureFormat(form) in (formats or [FigureFormat.PNG])]
    drawn, notes = plot_files(runs, out, forms, metrics or [], until)
    for note in notes:
        typer.echo(note, err=True)
    for path in drawn:
        typer.echo(path)


_FILE = "Output file. Default: RUN/report.html, or `report.html` in the working directory for several runs."


@only_looking
def report(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Directories of runs, for example runs/run.")],
    out: Annotated[Path | None, Option(help=_FILE)] = None,
) -> None:
    """Write an HTML report of runs: tables, curves, episodes with their credit, recipes. Runs may still be training.

    The file is self-contained and loads nothing from the network.

    Examples:
    posttrain report runs/run
    posttrain report runs/ppo runs/grpo --out comparison.html
    """
    from posttrain.plugins import require_module

    require_module("matplotlib", "posttrain report")
    from posttrain.view.report import write_html

    file, notes = write_html(runs, out)
    for note in notes:
        typer.echo(note, err=True)
    typer.echo(file)


_SIDES = (
    "Run directories, results files or directories of them, or files of predictions or scores. Separate the training runs of a "
    "side, or its files with different metrics, by commas, and name a side as in `grpo=runs/g1,runs/g2,runs/g3`."
)
_FILES = "Write to this .json, .md or .csv file. May be given several times."


@only_looking
def compare(
    words: Annotated[list[str], Argument(metavar="A B [C ...]", help=_SIDES)],
    metrics: Annotated[str | None, Option(help="Comma-separated metrics, in this order. Default: all.")] = None,
    base: Annotated[str | None, Option(help="The side that the others are compared with. Default: the first.")] = None,
    out: Annotated[list[Path] | None, Option(help=_FILES)] = None,
) -> None:
    """Compare models on the items that they share: values, paired differences from one of them, and the conclusion.

    Examples:
    posttrain compare runs/before runs/after
    posttrain compare base=runs/b1,runs/b2,runs/b3 new=runs/n1,runs/n2,runs/n3 --metrics success
    posttrain compare sft=results/sft dpo=results/dpo ppo=results/ppo --out table.md --out table.csv
    """
    from posttrain.evaluation.compare import compare as compare_sides
    from posttrain.evaluation.compare import require_formats
    from posttrain.evaluation.sides import read_sides
    from posttrain.terminal import new_console

    require_formats(out or [])
    wanted = None if metrics is None else [name.strip() for name in metrics.split(",") if name.strip()]
    comparison = compare_sides(read_sides(words, wanted), wanted, base)
    table = comparison.table()
    new_console(highlight=False).print(table)
    for line in [table.note, *comparison.details, *(f"warning: {line}" for line in comparison.warnings)]:
        typer.echo(line)
    for path in out or []:
        comparison.write(path)
        typer.echo(f"comparison: {path}")
    typer.echo(comparison.sentence())


@only_looking
def view(
    folder: Annotated[
        Path, Argument(metavar="[RUNS_FOLDER]", help="Folder of runs, or the directory of one run.")
    ] = Path("runs"),
    port: Annotated[int, Option(help="Port of the loopback address; 0 picks a free one.", min=0, max=65535)] = 0,
    browser: Annotated[bool, Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Serve a local page about runs: live curves, episodes with their credit, comparisons.

    Only this machine can open it, with the token in the printed address. Nothing is loaded from the network, and no code
    that a run names is imported. Over SSH, forward the port: `ssh -L 8321:127.0.0.1:8321 HOST`.

    Examples:
    posttrain view
    posttrain view runs --port 8321 --no-browser
    """
    import secrets
    import webbrowser
    from urllib.parse import quote

    from posttrain.errors import InputError
    from posttrain.loopback import ADDRESS, http_server, open_listener
    from posttrain.plugins import require_module
    from posttrain.terminal import printable

    for module in ("starlette", "uvicorn"):
        require_module(module, "posttrain view")
    from posttrain.view.server import guarded

    if not folder.is_dir():
        raise InputError(
            f"there is no folder {folder}; name the folder of your runs, for example `posttrain view runs`"
        )
    single = (folder / "recipe.yaml").is_file() and (folder / "environment.json").is_file()
    path = f"/run/{quote(printable(folder.resolve().name))}" if single else "/"
    with open_listener(port, "--port") as on:
        token, bound = secrets.token_urlsafe(24), on.getsockname()[1]
        guard = guarded(folder.resolve().parent if single else folder, bound, token)
        address = f"http://{ADDRESS}:{bound}{path}?token={token}"
        typer.echo(f"{address}\nCtrl-C ends it")
        if browser:
            webbrowser.open(address)
        http_server(guard).run([on])


_FORM = "hf: safetensors and tokenizer. gguf: one file for llama.cpp and Ollama."
_LICENCE = "Identifier for the model card. Default: the base model's, where it is known."
_PUSH = (
    "Upload the safetensors and the card to this repository of the Hugging Face hub, which is created if it does not exist, "
    "instead of writing a folder. Log in first with `hf auth login`."
)
_PUBLIC = "With --push, create a public repository instead of a private one."


def export(
    run: Annotated[Path, Argument(metavar="RUN", help="Directory of a run that has ended.")],
    to: Annotated[str, Option(metavar="FORM", help=_FORM)] = "hf",
    out: Annotated[Path | None, Option(metavar="FOLDER", help="Folder to write. Default: RUN-FORM.")] = None,
    kind: Annotated[str, Option("--type", help="Weights of a GGUF file: f32, f16, bf16 or q8_0.")] = "f16",
    shard_gigabytes: Annotated[float, Option(min=0.000001, help="Maximum size of a safetensors file.")] = 5.0,
    licence: Annotated[str | None, Option("--licence", "--license", help=_LICENCE)] = None,
    push: Annotated[str | None, Option(metavar="USER/NAME", help=_PUSH)] = None,
    public: Annotated[bool, Option("--public", help=_PUBLIC)] = False,
    revision: Annotated[str | None, Option(help="With --push: the branch to commit to. Default: main.")] = None,
) -> None:
    """Write or upload the model of a run for another program, with a model card and its recipe.

    Examples:
    posttrain export runs/run
    posttrain export runs/run --to gguf --type q8_0
    posttrain export runs/run --push user/name --public --licence apache-2.0
    """
    from posttrain.errors import InputError
    from posttrain.publishing.export import export_run, push_run
    from posttrain.runs.directory import RunDirectory

    if push is not None:
        if to != "hf" or out is not None:
            raise InputError("--push uploads the form hf and writes no folder; remove --to and --out")
        opened = RunDirectory.open(run)
        typer.echo(push_run(opened, push, private=not public, licence=licence, revision=revision, tell=typer.echo))
        return
    if public or revision is not None:
        raise InputError("--public and --revision are of an upload; add --push USER/NAME")
    folder = out or run.with_name(f"{run.name}-{to}")
    files = export_run(
        RunDirectory.open(run), to, folder, kind=kind, shard_gigabytes=shard_gigabytes, licence=licence, tell=typer.echo
    )
    for file in files:
        typer.echo(f"{file}  {file.stat().st_size / 1e6:.1f} MB")
    if to == "gguf":
        typer.echo(f"use it with: llama-cli -m {folder}/{run.name}.gguf")


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
