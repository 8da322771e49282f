"""`posttrain memory undo` and `posttrain memory journal`: what was changed in a memory, by whomever, and back."""

from typing import Annotated

import typer

from posttrain.cli.memory import VaultFolder


def undo(
    vault: VaultFolder,
    count: Annotated[int, typer.Option(help="How many operations to take back, the last ones.", min=1)] = 1,
) -> None:
    """Take back the last operations on a memory, those of earlier chats and of MCP clients too; all or none.

    Examples:

    posttrain memory undo notes

    posttrain memory undo notes --count 3
    """
    from posttrain.agents.history import undo as taken_back

    for line in taken_back(vault, count):
        print(f"taken back: {line.strip()}")


def journal(
    vault: VaultFolder,
    count: Annotated[int, typer.Option(help="How many operations to list.", min=1)] = 20,
) -> None:
    """List the last operations on a memory, newest first: number, time, and what became of each note.

    Example:

    posttrain memory journal notes --count 5
    """
    from posttrain.agents.history import last_operations

    for line in last_operations(vault, count) or ["the journal is empty; there is nothing to undo"]:
        print(line)
