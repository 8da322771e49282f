"""The command that exports or uploads a trained model."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

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
