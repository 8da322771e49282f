"""Groups of commands: those that plug-ins add, imported when they are run or listed in a help text, and the errors for
commands and options that do not exist."""

import difflib
import inspect
import re
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from posttrain.errors import InputError
from posttrain.plugins import Group, PluginError, entry_points, load, more

_GROUP: Group = "posttrain.commands"
_STAGES: Group = "posttrain.stages"
_OF_OTHERS = {
    "train": ("sft", "reward", "dpo", "rl", "distill"),
    "grpo": ("rl",),
    "ppo": ("rl",),
    "rloo": ("rl",),
    "kto": ("dpo",),
    "orpo": ("dpo",),
    "eval": ("evaluate",),
    "infer": ("generate",),
    "predict": ("generate",),
    "convert": ("data convert",),
    "list": ("runs list",),
    "prune": ("runs clean",),
}
"""Commands of other systems and their counterparts here."""


class PluginGroup(TyperGroup):
    """A command group that also offers the commands declared by plug-ins for its place in the command line."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the built-in commands, then those of plug-ins."""
        place = _place(ctx)
        added = [name.removeprefix(place) for name in entry_points(_GROUP) if name.startswith(place)]
        added += [] if place else entry_points(_STAGES)
        return [*super().list_commands(ctx), *(n for n in added if "." not in n and n not in self.commands)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command `cmd_name`. Built-in commands take precedence; None if there is no such command."""
        command = self._command(ctx, cmd_name)
        if command is not None:
            _flags_without_value(command.get_params(ctx))
            # In Markdown, an example is a paragraph.
            command.help = re.sub(r"(?<!\n)\n(?=posttrain )", "\n\n", command.help or "")
        return command

    def get_params(self, ctx: Any) -> Any:
        """The options of the group itself."""
        return _flags_without_value(super().get_params(ctx))

    def _command(self, ctx: Any, cmd_name: str) -> Any:
        name = f"{_place(ctx)}{cmd_name}"
        known = cmd_name in self.commands or "." in cmd_name
        try:
            if not known and name in entry_points(_GROUP):
                return _command(cmd_name, load(_GROUP, name))
            if known or name != cmd_name:
                return TyperGroup.get_command(self, ctx, cmd_name)
            from posttrain.cli.stages import OPEN, stage_command
            from posttrain.recipe.stages import STAGES

            if cmd_name not in STAGES:
                return None
            return _command(cmd_name, stage_command(cmd_name, inspect.getdoc(STAGES[cmd_name]) or ""), OPEN)
        except PluginError as error:
            return _unavailable(cmd_name, error)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that `args` begins with, and the rest of `args`. Raises InputError if there is no such command."""
        name, place = args[0], ctx.command_path
        if name.startswith("-") or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        near = [f"{place} {other}" for other in difflib.get_close_matches(name, self.list_commands(ctx), 1, 0.6)]
        near = near or [f"posttrain {other}" for other in _OF_OTHERS.get(name, ())]
        hint = (
            f"the nearest is {' or '.join(f'`{other}`' for other in near)}" if near else f"`{place} --help` lists them"
        )
        raise InputError(f"there is no command `{place} {name}`; {hint}{more()}")


def _flags_without_value(params: Any) -> Any:
    """The parameters, of which the help shows flags without `<bool>`."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


def usage_message(error: Any) -> str:
    """One sentence for an error in options or arguments, with the command whose help has the right ones."""
    text = " ".join(error.format_message().replace("Value error, ", "").split()).rstrip(".")
    command = error.ctx.command_path if error.ctx is not None else "posttrain"
    return f"{text[:1].lower()}{text[1:]}; `{command} --help` shows the options and arguments" if text else ""


def _place(ctx: Any) -> str:
    """The dotted prefix of commands of the group that `ctx` belongs to; empty for the top level."""
    names = []
    while ctx.parent is not None:
        names.append(f"{ctx.info_name}.")
        ctx = ctx.parent
    return "".join(reversed(names))


def _command(name: str, added: Any, settings: dict[str, Any] | None = None) -> Any:
    """A typer app as a group of commands, a function as one command with the context `settings`."""
    if isinstance(added, typer.Typer):
        command: Any = get_group(added)
    else:
        single = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        single.command(name, context_settings=settings)(added)
        command = get_command(single)
    command.name = name
    return command


def _unavailable(name: str, error: PluginError) -> Any:
    """A command that raises `error` however it is called. The help text of its group shows the reason."""

    def fail() -> None:
        raise error

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    single = typer.Typer(add_completion=False)
    single.command(name, help=f"Unavailable: {error}", context_settings=settings, add_help_option=False)(fail)
    return get_command(single)
