"""`posttrain data convert`."""

from pathlib import Path
from typing import Annotated

import typer


def convert(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="helpsteer3, helpsteer3_prompts, gsm8k or ultrafeedback_binarized.", show_default=False
        ),
    ],
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[SOURCE]", help="A file, a directory, or a hub id; without it, the published data set on the hub."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The .jsonl or .parquet file to write; NAME.jsonl if not given.")
    ] = None,
    language: Annotated[
        str | None, typer.Option(help="helpsteer3: the language to keep, english if not given; `any` keeps all.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of a hub data set; its training split if not given.")] = None,
    limit: Annotated[int | None, typer.Option(help="Rows to write.", min=1)] = None,
    shuffle: Annotated[
        bool,
        typer.Option("--shuffle", help="Write the rows in a random order, always the same; --limit draws from all."),
    ] = False,
) -> None:
    """Convert a published data set to rows that the stages read; what is left out is counted by reason.

    HelpSteer3 becomes preference pairs: a negative preference chooses response 1, a neutral one is skipped, and a
    sample of rows is compared with what their annotators wrote.

    Examples:

    posttrain data convert helpsteer3 --out helpsteer3_train.jsonl

    posttrain data convert helpsteer3 --split validation --language any --out helpsteer3_val.parquet

    posttrain data convert helpsteer3_prompts --split validation --shuffle --limit 400 --out prompts_val.jsonl

    posttrain data convert gsm8k train.jsonl --out gsm8k_train.jsonl --limit 1000
    """
    from posttrain.data.convert import convert_rows

    target = out or Path(f"{name}.jsonl")
    done = convert_rows(name, target, source, language, split, limit, shuffle)
    for line in done.lines():
        typer.echo(line)
    typer.echo(f"wrote {target}")
