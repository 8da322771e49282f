"""`posttrain benchmark`."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from posttrain.errors import InputError

_FOLDER = Path(__file__).parents[3] / "benchmarks"
"""Folder of the scripts in a checkout. An installed package has no scripts."""
PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""Context settings: every option, including --help, is passed to the script."""


def benchmark(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME [OPTION ...]]", help="A script of `benchmarks/`, and its options."),
    ] = None,
) -> None:
    """List the benchmarks of this checkout, or run one with the options after its name.

    Examples:

    posttrain benchmark

    posttrain benchmark sft --model smollm2 --rounds 3

    posttrain benchmark rl --help
    """
    if words == ["--help"]:
        typer.echo(context.get_help())
        return
    scripts = _scripts(_FOLDER)
    if not words:
        width = max(map(len, scripts))
        for name, script in scripts.items():
            typer.echo(f"{name:<{width}}  {_first_line(script)}")
        return
    name, *options = words
    if name not in scripts:
        raise InputError(f"there is no benchmark {name!r}; use one of {', '.join(scripts)}")
    code = subprocess.run([sys.executable, str(scripts[name]), *options], check=False).returncode
    if code:
        raise typer.Exit(code if code > 0 else 1)


def _scripts(folder: Path) -> dict[str, Path]:
    """Name -> script. InputError if there is no such folder."""
    scripts = {file.stem: file for file in sorted(folder.glob("*.py")) if not file.stem.startswith("_")}
    if not scripts:
        raise InputError(
            "benchmarks need a checkout; run `posttrain benchmark` in one that is installed with `pip install -e .`"
        )
    return scripts


def _first_line(script: Path) -> str:
    """The first line of the script's docstring; the script is not run."""
    return (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").split("\n")[0]
