"""`posttrain import`: commands of other frameworks as recipes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from posttrain_import.commands import Imported


def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="COMMAND|FILE",
            help="A command line in quotes, or a script or Markdown file that contains commands.",
        ),
    ],
    variables: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUE ...]", help="Values of shell variables that the commands use and do not set."
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of training rows or prompts, to convert epochs into steps. Default: counted in local files.",
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(metavar="PATH", help="Recipe file to write, or a folder for one file per command, NAME.yaml."),
    ] = Path(),
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as Markdown and write nothing.")
    ] = False,
    ignore_unknown: Annotated[
        bool, typer.Option("--ignore-unknown", help="Write recipes although flags are unknown.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing recipe files.")] = False,
) -> None:
    """Convert commands of OpenRLHF, TRL, verl or RAGEN to recipes, and list the result for each flag.

    Examples:

    posttrain import "trl grpo --model_name_or_path Qwen/Qwen3-0.6B --dataset_name prompts.jsonl --max_steps 200"

    posttrain import train_ppo.sh --rows 5000 --out ppo.yaml

    posttrain import train_agent.sh KL_TARGET=0.02 MODEL_NAME=Qwen/Qwen3-4B
    """
    from posttrain.errors import InputError
    from posttrain_import.commands import import_commands
    from posttrain_import.shell import assignments
    from posttrain_import.tables import markdown_table

    found, others = import_commands(source, assignments(variables or []), rows)
    for imported in found:
        if markdown:
            typer.echo(markdown_table(imported), nl=False)
        else:
            _show(imported)
    unknown = [row for imported in found for row in imported.unknown]
    if unknown and not ignore_unknown:
        raise InputError(
            "\n".join(
                f"{row.flag}: {row.answer.note}; correct it, remove it, or pass --ignore-unknown" for row in unknown
            )
        )
    if markdown:
        return
    for command in others:
        typer.echo(f"not imported: {' '.join(command.words)[:120]}")
    files = _files(found, out)
    for imported in found:
        imported.recipe() if not imported.replacement else None
    taken = [file for file in files.values() if file.exists() and not overwrite]
    if taken:
        raise InputError(f"{', '.join(map(str, taken))} exists; choose another --out, or pass --overwrite")
    for number, imported in enumerate(found):
        if number in files:
            files[number].parent.mkdir(parents=True, exist_ok=True)
            files[number].write_text(imported.recipe_text(), encoding="utf-8")
            typer.echo(f"wrote {files[number]}")
        typer.echo(f"run it with: {imported.command(str(files.get(number, '')))}")


def _files(found: "list[Imported]", out: Path) -> dict[int, Path]:
    """Number of each command that becomes a recipe -> its file."""
    from posttrain.errors import InputError

    made = [number for number, imported in enumerate(found) if not imported.replacement]
    if out.suffix in (".yaml", ".yml"):
        if len(made) > 1:
            raise InputError(f"{out} is one file and there are {len(made)} commands; name a folder")
        return dict.fromkeys(made, out)
    files: dict[int, Path] = {}
    for number in made:
        first = found[number].name[:100]  # names of files have at most 255 bytes
        name, copy = first, 2
        while out / f"{name}.yaml" in files.values():
            name, copy = f"{first}-{copy}", copy + 1
        files[number] = out / f"{name}.yaml"
    return files


def _show(imported: "Imported") -> None:
    """Print the flags of a command and their results."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    from posttrain.terminal import new_console
    from posttrain_import.commands import shown_value
    from posttrain_import.rows import SET

    console = new_console()
    title = f"{imported.framework} as posttrain {imported.stage}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("flag", overflow="fold", max_width=32)
    table.add_column("", no_wrap=True)
    table.add_column("here", overflow="fold")
    for row in imported.rows:
        here = [f"{key}={shown_value(value)}" for key, value in row.answer.keys.items()]
        table.add_row(
            escape(row.label if row.value == SET else f"{row.label} {row.value}"),
            row.answer.outcome,
            escape("\n".join([*here, *([row.answer.note] if row.answer.note else [])])),
        )
    console.print(table)
    counts: dict[str, int] = {}
    for row in imported.rows:
        counts[row.answer.outcome] = counts.get(row.answer.outcome, 0) + 1
    console.print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()), highlight=False)
    for row in imported.missing:
        console.print(
            f"not supported: {row.label} {row.value}: {row.answer.note}", markup=False, highlight=False, soft_wrap=True
        )
