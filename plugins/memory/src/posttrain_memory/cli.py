"""`posttrain memory`: chat with the memory agent, serve a vault over MCP, list and undo changes. `posttrain data worlds`: generated
vaults of notes, with tasks whose correct answer is known."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from posttrain.cli.plugins import PluginGroup

if TYPE_CHECKING:
    from posttrain_memory.worlds.recipe import WorldRecipe

_HELP = "Use the memory agent: a model that keeps Markdown notes by writing Python."
app = typer.Typer(cls=PluginGroup, help=_HELP, no_args_is_help=True, rich_markup_mode="markdown")
VaultFolder = Annotated[Path, typer.Argument(help="Folder of the vault.")]
ModelName = Annotated[
    str | None, typer.Option("--model", help="Path or hub id of a model; with --url, the model's name on the server.")
]
Url = Annotated[
    str | None, typer.Option("--url", help="An OpenAI-compatible server, such as http://localhost:8000/v1.")
]
Key = Annotated[str | None, typer.Option("--key", help="Environment variable with the server's API key.")]
Rules = Annotated[
    list[str] | None,
    typer.Option("--filter", help="Privacy rules for every question or call, in YAML; can be repeated."),
]
Temperature = Annotated[
    float | None,
    typer.Option(help="Sampling temperature. Default: 0 (greedy); with --url, the server's default.", min=0),
]
MaxTurns = Annotated[int | None, typer.Option(help="Maximum number of model messages per question. Default: 8.", min=2)]
NoThinking = Annotated[bool, typer.Option("--no-thinking", help="For models trained without `<think>`.")]
Prompt = Annotated[Literal["full", "brief"], typer.Option(help="The system prompt that the model was trained with.")]
OpenedBy = Annotated[
    Literal["policy", "environment", "template"], typer.Option(help="`environment.opened_by` of the model's training.")
]
ReadOnly = Annotated[bool, typer.Option("--read-only", help="Never change notes; take no lock.")]


@app.command()
def chat(
    vault: VaultFolder,
    model: ModelName = None,
    url: Url = None,
    key: Key = None,
    rules: Rules = None,
    temperature: Temperature = None,
    max_turns: MaxTurns = None,
    no_thinking: NoThinking = False,
    prompt: Prompt = "full",
    opened_by: OpenedBy = "policy",
    read_only: ReadOnly = False,
    new: Annotated[
        bool, typer.Option("--new", help="Create the folder and an empty user.md if they are missing.")
    ] = False,
) -> None:
    """Chat with a memory agent in a terminal, or with one question per line on standard input.

    Examples:
    posttrain memory chat notes --new --model runs/memory/rl/model --prompt brief --max-turns 5
    posttrain memory chat notes --url http://localhost:8000/v1 --model qwen3-4b --filter "hide: [{category: phone}]"
    posttrain memory chat notes --model runs/memory/rl/model --prompt brief < questions.txt
    """
    import sys
    from contextlib import closing

    from posttrain.terminal import new_console
    from posttrain_memory.agent.chat import answer_lines
    from posttrain_memory.agent.chat import chat as chat_in_terminal
    from posttrain_memory.agent.opening import live_settings, open_chat_client, open_vault
    from posttrain_memory.agent.session import MemoryAgent
    from posttrain_memory.interpreter.pool import Interpreter
    from posttrain_memory.privacy.rules import vault_rules

    settings = live_settings(max_turns, not no_thinking, prompt, opened_by)
    opened = open_vault(vault, new, read_only)
    try:
        chat_client = open_chat_client(model, url, key, temperature, settings.thinking)
        interpreter = Interpreter(settings.interpreter)
        standing = [*vault_rules(vault, "chat"), *(rules or [])]
        with interpreter, closing(MemoryAgent(opened, chat_client, interpreter, settings, standing)) as agent:
            if not sys.stdin.isatty():
                answer_lines(agent, (line.decode(errors="replace") for line in sys.stdin.buffer))
                return
            notes = f"{len(agent.visible_vault().paths())} notes in {vault}"
            about = [notes, f"model {model}{f' at {url}' if url else ''}"]
            about += [f"{len(agent.rules)} privacy rule{'s' * (len(agent.rules) > 1)}"] if agent.rules else []
            about += ["read-only"] if read_only else []
            chat_in_terminal(agent, new_console(), f"{', '.join(about)}; /help lists commands, Ctrl-D leaves")
    finally:
        opened.close()


@app.command()
def mcp(
    vault: VaultFolder,
    model: ModelName = None,
    url: Url = None,
    key: Key = None,
    rules: Rules = None,
    temperature: Temperature = None,
    max_turns: MaxTurns = None,
    no_thinking: NoThinking = False,
    prompt: Prompt = "full",
    opened_by: OpenedBy = "policy",
    read_only: ReadOnly = False,
) -> None:
    """Serve a vault over the Model Context Protocol: list, search and read notes, and with a model ask questions.

    Examples:
    posttrain memory mcp notes --model runs/memory/rl/model --prompt brief
    posttrain memory mcp notes --url http://localhost:8000/v1 --model qwen3-4b --filter "hide: [{category: phone}]"
    posttrain memory mcp notes --read-only
    """
    from posttrain_memory.agent.opening import live_settings, open_chat_client
    from posttrain_memory.mcp.answers import Answers
    from posttrain_memory.mcp.notes import SharedNotes
    from posttrain_memory.mcp.server import memory_server, private_wire, serve_stdio
    from posttrain_memory.privacy.rules import vault_rules

    # Before a model is loaded, because loading may print: stdout belongs to the protocol.
    with private_wire() as wire:
        notes = SharedNotes(vault, [*vault_rules(vault, "mcp"), *(rules or [])])
        notes.check(writable=not read_only)
        settings = live_settings(max_turns, not no_thinking, prompt, opened_by)
        answers = None
        if model is not None or url is not None:
            answers = Answers(
                notes, open_chat_client(model, url, key, temperature, settings.thinking), settings, read_only
            )
        else:
            typer.echo("posttrain: without --model, `ask` is not available; list, search and read are", err=True)
        if wire[0].isatty():
            typer.echo("posttrain: a client is expected on stdin; Ctrl-C ends", err=True)
        serve_stdio(memory_server(notes, answers, read_only), wire)


@app.command()
def undo(
    vault: VaultFolder,
    count: Annotated[int, typer.Option(help="Number of operations to undo, counted from the last.", min=1)] = 1,
) -> None:
    """Undo the last operations on a vault, including those of earlier chats and MCP clients; all or none.

    Examples:
    posttrain memory undo notes
    posttrain memory undo notes --count 3
    """
    from posttrain_memory.agent.history import undo as undo_operations

    for line in undo_operations(vault, count):
        print(f"undone: {line.strip()}")


@app.command()
def journal(
    vault: VaultFolder, count: Annotated[int, typer.Option(help="Number of operations to list.", min=1)] = 20
) -> None:
    """List the last operations on a vault, newest first: number, time, and the change of each note.

    Example:
    posttrain memory journal notes --count 5
    """
    from posttrain_memory.agent.history import last_operations

    for line in last_operations(vault, count) or ["the journal is empty; nothing to undo"]:
        print(line)


def worlds(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value ...]", help="Settings of the worlds, such as notes=4 or bare=true."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Output directory.")] = Path("worlds"),
    seed: Annotated[int, typer.Option(help="Random seed of the worlds.", min=0)] = 0,
    train: Annotated[int, typer.Option(help="Number of training worlds.", min=0)] = 400,
    dev: Annotated[int, typer.Option(help="Number of worlds for selecting a checkpoint.", min=0)] = 40,
    test: Annotated[int, typer.Option(help="Number of test worlds.", min=0)] = 40,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="Write JSON lines instead of Parquet.")] = False,
) -> None:
    """Write generated worlds of notes and tasks about them: facts to find, to change, to ask about, and to keep
    private.

    No world is in two splits, and no question occurs twice. See docs/reference/worlds.md for the keys and the columns.

    Examples:
    posttrain data worlds --out worlds --seed 0 --train 400 --dev 40 --test 40
    posttrain data worlds --train 2000 notes=4 facts=[1,2] filler=[0,0] bare=true back_links=false
    """
    from posttrain.cli.env import environment_of
    from posttrain.data.files import write_rows
    from posttrain_memory.worlds.generation import SPLITS, row_of, samples

    recipe: WorldRecipe = environment_of("memory", [f"worlds.{word}" for word in words or []]).worlds  # type: ignore[attr-defined]
    counts = {"test": test, "dev": dev, "train": train}
    generated = list(samples(seed, recipe, counts))
    for split in reversed(SPLITS):
        rows = [row_of(sample) for sample in generated if sample.split == split]
        if rows:
            path = out / f"worlds_{split}.{'jsonl' if jsonl else 'parquet'}"
            write_rows(path, rows)
            kinds = Counter(row["kind"] for row in rows)
            counted = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
            typer.echo(f"{path}: {len(rows)} tasks in {len({row['world'] for row in rows})} worlds: {counted}")
