"""`posttrain import`: commands of other frameworks as recipes."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer


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
    from posttrain.terminal import new_console
    from posttrain_import.commands import import_commands
    from posttrain_import.shell import assignments
    from posttrain_import.tables import markdown_table, terminal_table

    commands, others = import_commands(source, assignments(variables or []), rows)
    console = new_console()
    for imported in commands:
        if markdown:
            typer.echo(markdown_table(imported), nl=False)
            continue
        console.print(terminal_table(imported))
        counts = Counter(row.answer.outcome for row in imported.rows)
        console.print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()), highlight=False)
        for row in imported.missing:
            sentence = f"not supported: {row.label} {row.value}: {row.answer.note}"
            console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    unknown = [row for imported in commands for row in imported.unknown]
    if unknown and not ignore_unknown:
        remedy = "correct it, remove it, or pass --ignore-unknown"
        raise InputError("\n".join(f"{row.flag}: {row.answer.note}; {remedy}" for row in unknown))
    if markdown:
        return
    for command in others:
        typer.echo(f"not imported: {' '.join(command.words)[:120]}")
    recipes = [imported for imported in commands if not imported.replacement]
    single = out.suffix in (".yaml", ".yml")
    if single and len(recipes) > 1:
        raise InputError(f"{out} is one file and there are {len(recipes)} commands; name a folder")
    files = {out if single else out / f"{imported.name}.yaml": imported for imported in recipes}
    for imported in recipes:
        imported.recipe()  # an error before anything is written
    taken = [file for file in files if file.exists() and not overwrite]
    if taken:
        raise InputError(f"{', '.join(map(str, taken))} exists; choose another --out, or pass --overwrite")
    for file, imported in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(imported.recipe_text(), encoding="utf-8")
        typer.echo(f"wrote {file}\nrun it with: {imported.command(str(file))}")
    for imported in commands:
        if imported.replacement:
            typer.echo(f"run it with: {imported.command('')}")
