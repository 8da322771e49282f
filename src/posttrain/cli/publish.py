"""The commands that export and upload a trained model."""

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run that has ended.")]
Licence = Annotated[
    str | None,
    typer.Option(
        "--licence", "--license", help="Identifier for the model card. Default: the base model's, where it is known."
    ),
]


def export(
    run: Run,
    to: Annotated[
        str,
        typer.Option(
            metavar="FORM",
            help="hf: safetensors and tokenizer. gguf: one file for llama.cpp. ollama: that file and a Modelfile.",
        ),
    ] = "hf",
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder to write. Default: RUN-FORM.")] = None,
    kind: Annotated[str, typer.Option("--type", help="Weights of a GGUF file: f32, f16, bf16 or q8_0.")] = "f16",
    shard_gigabytes: Annotated[float, typer.Option(min=0.000001, help="Maximum size of a safetensors file.")] = 5.0,
    licence: Licence = None,
) -> None:
    """Write the model of a run for another program, with a model card and its recipe.

    Examples:

    posttrain export runs/run

    posttrain export runs/run --to gguf --type q8_0

    posttrain export runs/run --to ollama --out my-model
    """
    from posttrain.publishing.export import export_run
    from posttrain.runs.directory import RunDirectory

    folder = out or run.with_name(f"{run.name}-{to}")
    files = export_run(
        RunDirectory.open(run), to, folder, kind=kind, shard_gigabytes=shard_gigabytes, licence=licence, tell=typer.echo
    )
    for file in files:
        typer.echo(f"{file}  {file.stat().st_size / 1e6:.1f} MB")
    uses = {
        "ollama": f"ollama create {run.name} -f {folder}/Modelfile",
        "gguf": f"llama-cli -m {folder}/{run.name}.gguf",
    }
    if to in uses:
        typer.echo(f"use it with: {uses[to]}")


def push(
    run: Run,
    repository: Annotated[
        str, typer.Argument(metavar="USER/NAME", help="Repository on the hub; created if it does not exist.")
    ],
    public: Annotated[
        bool, typer.Option("--public", help="Create a public repository instead of a private one.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to commit to. Default: main.")] = None,
    licence: Licence = None,
) -> None:
    """Upload the model of a run with its card to the Hugging Face hub. Log in first with `hf auth login`.

    Examples:

    posttrain push runs/run user/name

    posttrain push runs/run user/name --public --licence apache-2.0
    """
    from posttrain.publishing.push import push_run
    from posttrain.runs.directory import RunDirectory

    typer.echo(
        push_run(
            RunDirectory.open(run), repository, private=not public, licence=licence, revision=revision, tell=typer.echo
        )
    )
