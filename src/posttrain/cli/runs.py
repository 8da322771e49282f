"""`posttrain episodes`, `plot`, `report` and `compare`: read finished and running runs, and results."""

from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option


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
