"""`posttrain memory mcp`: the memory for other programs."""

from typing import Annotated

import typer

from posttrain.cli.memory import (
    Key,
    MaxTurns,
    ModelName,
    NoThinking,
    OpenedBy,
    Opener,
    Prompt,
    PromptLength,
    ReadOnly,
    Rules,
    Temperature,
    Url,
    VaultFolder,
)


def mcp(
    vault: VaultFolder,
    model: ModelName = None,
    url: Url = None,
    key: Key = None,
    rules: Rules = None,
    temperature: Temperature = None,
    max_turns: MaxTurns = None,
    no_thinking: NoThinking = False,
    prompt: Prompt = PromptLength.full,
    opened_by: OpenedBy = Opener.policy,
    read_only: ReadOnly = False,
    http: Annotated[
        int | None,
        typer.Option(metavar="PORT", help="HTTP on 127.0.0.1 instead of stdio; 0 is any free port.", min=0, max=65_535),
    ] = None,
    token_variable: Annotated[
        str | None,
        typer.Option(help="Environment variable that holds the token for HTTP; without it, one is made and printed."),
    ] = None,
) -> None:
    """Serve a memory to other programs over the Model Context Protocol: list, search, read, and with a model ask.

    Examples:

    posttrain memory mcp notes --model runs/memory/model

    posttrain memory mcp notes --url http://localhost:8000/v1 --model qwen3-4b --filter "Do not reveal phone numbers."

    posttrain memory mcp notes --read-only --http 8765
    """
    from contextlib import ExitStack

    from posttrain.agents.mcp_answers import Answers
    from posttrain.agents.mcp_http import listener, serve_http, token_of
    from posttrain.agents.mcp_notes import SharedNotes
    from posttrain.agents.mcp_server import memory_server, private_wire, serve_stdio
    from posttrain.agents.opening import open_speaker, settings_in_use
    from posttrain.errors import InputError

    if token_variable is not None and http is None:
        raise InputError("--token-variable is for HTTP; give --http, too")
    with ExitStack() as stack:
        # Before a model is loaded: stdout is for the protocol alone.
        wire = stack.enter_context(private_wire()) if http is None else None
        notes = SharedNotes(vault, rules or ())
        notes.check(writable=not read_only)
        settings = settings_in_use(max_turns, not no_thinking, prompt.value, opened_by.value)
        token = token_of(token_variable) if http is not None else ""
        on = stack.enter_context(listener(http)) if http is not None else None
        answers = None
        if model is not None or url is not None:
            speaker = open_speaker(model, url, key, temperature, settings.thinking)
            answers = Answers(notes, speaker, settings, read_only)
        else:
            typer.echo("posttrain: no --model, so `ask` is not offered; list, search and read are", err=True)
        server = memory_server(notes, answers, read_only)
        if wire is not None:
            if wire[0].isatty():
                typer.echo("posttrain: a client is expected on stdin; Ctrl-C ends", err=True)
            serve_stdio(server, wire)
        if on is not None:
            if token_variable is None:
                typer.echo(f"posttrain: send the header Authorization: Bearer {token}", err=True)
            serve_http(server, on, token)
