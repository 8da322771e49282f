"""The `posttrain` command. Commands import heavy modules when they run, so that `--help` is fast."""

import errno
import os
import sys
import traceback
from contextlib import nullcontext
from typing import Annotated, Any

import typer
from typer import Argument, Option

from posttrain import __version__
from posttrain.cli.data import app as data
from posttrain.cli.env import app as env
from posttrain.cli.evaluate import app as evaluate
from posttrain.cli.models import chat, serve
from posttrain.cli.plugins import PluginGroup, usage_message
from posttrain.cli.runs import app as runs
from posttrain.cli.runs import compare, episodes, export, plot, report, view
from posttrain.cli.stages import KEYED, OPEN, demo, fit_normalizer
from posttrain.distributed.stopping import second_signal_ends
from posttrain.errors import PosttrainError, plain_warnings
from posttrain.plugins import trusting
from posttrain.runs.directory import storage_error
from posttrain.terminal import escaped_output

_UsageError: Any = typer.BadParameter.__base__
"""The class of errors in options and arguments, in click or in typer's copy of it."""
_INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM."""


def doctor() -> None:
    """Describe this machine: versions, devices and missing extras. Add the output to bug reports.

    Example:
    posttrain doctor
    """
    from posttrain.doctor import machine

    for name, fact in machine():
        typer.echo(f"{name:<14}  {fact}")


_ABOUT = "`list` for the recipes that can be named; or a key or a section to explain."
_STAGE = "The stage whose keys are shown: rl, sft, reward, dpo, evaluate or generate."
_MARKDOWN = "All keys of all stages, as docs/reference/recipes.md."


def recipe(
    about: Annotated[str, Argument(metavar="[list | KEY]", help=_ABOUT)] = "",
    stage: Annotated[str, Option(help=_STAGE)] = "rl",
    markdown: Annotated[bool, Option("--markdown", help=_MARKDOWN)] = False,
) -> None:
    """Show the keys of a recipe: what they may be, their default, and what they do.

    Examples:
    posttrain recipe list
    posttrain recipe
    posttrain recipe rollout.sampling
    posttrain recipe credit --stage rl
    """
    from posttrain.recipe.pages import list_recipes, markdown_reference, show_keys
    from posttrain.terminal import new_console

    if markdown:
        typer.echo(markdown_reference(), nl=False)
    elif about == "list":
        list_recipes(new_console())
    else:
        show_keys(about, stage, new_console())


_SETTINGS: dict[str, Any] = {"pretty_exceptions_enable": False, "add_completion": False, "rich_markup_mode": "markdown"}
app = typer.Typer(cls=PluginGroup, no_args_is_help=True, **_SETTINGS)
for verb in KEYED:
    app.command(context_settings=OPEN)(verb)
for plain in (demo, chat, compare, plot, report, view, episodes, recipe, doctor, export, serve):
    app.command()(plain)
app.command("fit-normalizer")(fit_normalizer)
app.add_typer(data, name="data", cls=PluginGroup)
app.add_typer(env, name="env", cls=PluginGroup)
app.add_typer(evaluate, name="evaluate")
app.add_typer(runs, name="runs", cls=PluginGroup)


_DEBUG = "Show tracebacks of errors. May appear anywhere on the command line."
_TRUST = (
    "Execute Python files that a recipe names, also outside the current folder, and all that a run of another user, folder or "
    "machine names. May appear anywhere on the command line."
)


@app.callback()
def _options(
    version: Annotated[bool, Option("--version", help="Show the version and exit.", is_eager=True)] = False,
    debug: Annotated[bool, Option("--debug", help=_DEBUG)] = False,
    trust: Annotated[bool, Option("--trust", help=_TRUST)] = False,
) -> None:
    """Post-training of language models and language-model agents.

    Examples:

    posttrain rl environment.type=bandit

    posttrain sft data.train=conversations.jsonl

    posttrain demo

    posttrain recipe rollout
    """


@escaped_output()
def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, 2 for invalid input, 1 for other failures, 130 if interrupted."""
    # transformers logs missing kernels of GPUs and its own deprecations.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    words = sys.argv[1:] if arguments is None else arguments
    debug, trust = "--debug" in words, "--trust" in words
    words = [word for word in words if word not in ("--debug", "--trust")]
    if words == ["--version"]:
        typer.echo(f"posttrain {__version__}")
        return 0
    try:
        with second_signal_ends(), plain_warnings(), nullcontext() if trust else trusting(words):
            code = app(words, prog_name="posttrain", standalone_mode=False)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException as error:
        if debug:
            traceback.print_exc()
        message, code = describe(error)
        for line in message.splitlines():
            typer.echo(f"posttrain: {line}", err=True)
        return code
    if code == _INTERRUPTED:
        typer.echo("posttrain: interrupted", err=True)
    return code if isinstance(code, int) else 0


def describe(error: BaseException) -> tuple[str, int]:
    """The message for `error`, and the exit code."""
    if isinstance(error, PosttrainError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "interrupted", _INTERRUPTED
    if isinstance(error, _UsageError):
        return usage_message(error), error.exit_code
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" while writing {error.filename}" if error.filename else ""
        return f"the disk is full{where}; free some space, then continue with --resume", 1
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and error.filename:
        return f"{error.filename}: {error.strerror}; change its permissions, or name another path", 1
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"the path {str(error.filename)[:80]}... is too long for the file system; shorten it", 2
    if not isinstance(error, OSError) and (reason := storage_error(error)):
        return f"a file could not be written: {reason}, then continue with --resume", 1
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # of `Path.expanduser`
        return "the home directory is unknown; write paths without `~`, or set HOME", 2
    text = " ".join(str(error).split())
    name = type(error).__name__
    return f"unexpected {name}{': ' if text else ''}{text}; run again with --debug for the traceback", 1


if __name__ == "__main__":
    sys.exit(main())
