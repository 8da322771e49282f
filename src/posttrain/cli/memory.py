"""`posttrain memory`: the memory agent in use."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Ask a memory agent: a model that keeps Markdown notes by writing Python.", no_args_is_help=True)


class PromptLength(StrEnum):
    """Which system prompt."""

    full = "full"
    brief = "brief"


class Opener(StrEnum):
    """Who writes the opening `<think>`."""

    policy = "policy"
    environment = "environment"
    template = "template"


VaultFolder = Annotated[Path, typer.Argument(help="Folder of the memory.")]
ModelName = Annotated[
    str | None, typer.Option("--model", help="Path or hub id of a model, or with --url its name at the server.")
]
Url = Annotated[
    str | None, typer.Option("--url", help="An OpenAI-compatible server, such as http://localhost:8000/v1.")
]
Key = Annotated[str | None, typer.Option("--key", help="Environment variable that holds the server's key.")]
Rules = Annotated[
    list[str] | None,
    typer.Option("--filter", help="A privacy rule for every question or call; may be given several times."),
]
Temperature = Annotated[
    float | None, typer.Option(help="0 is greedy, the default; with --url, the server's own by default.", min=0)
]
MaxTurns = Annotated[int | None, typer.Option(help="Most messages of the model to a question; 8.", min=2)]
NoThinking = Annotated[bool, typer.Option("--no-thinking", help="For models trained without `<think>`.")]
Prompt = Annotated[PromptLength, typer.Option(help="The system prompt that the model was trained with.")]
OpenedBy = Annotated[Opener, typer.Option(help="`environment.opened_by` of the model's training.")]
ReadOnly = Annotated[bool, typer.Option("--read-only", help="Change nothing, whatever is asked; take no lock.")]


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
    prompt: Prompt = PromptLength.full,
    opened_by: OpenedBy = Opener.policy,
    read_only: ReadOnly = False,
    new: Annotated[
        bool, typer.Option("--new", help="Make the memory where there is none, with an empty user.md.")
    ] = False,
) -> None:
    """Chat with a memory agent, in a terminal or with one question a line on standard input.

    Examples:

    posttrain memory chat notes --new --model runs/memory/model

    posttrain memory chat notes --url http://localhost:8000/v1 --model qwen3-4b --filter "Do not reveal phone numbers."

    echo "Where does Ada live?" | posttrain memory chat notes --model runs/memory/model
    """
    import sys
    from contextlib import closing

    from rich.console import Console

    from posttrain.agents.chat import LineChat, TerminalChat
    from posttrain.agents.opening import open_speaker, open_vault, settings_in_use
    from posttrain.agents.session import MemoryAgent
    from posttrain.environments.memory.interpreter import Interpreter

    settings = settings_in_use(max_turns, not no_thinking, prompt.value, opened_by.value)
    opened = open_vault(vault, new, read_only)
    try:
        speaker = open_speaker(model, url, key, temperature, settings.thinking)
        interpreter = Interpreter(settings.interpreter)
        with interpreter, closing(MemoryAgent(opened, speaker, interpreter, settings, rules or [])) as agent:
            if not sys.stdin.isatty():
                LineChat(agent).run(line.decode(errors="replace") for line in sys.stdin.buffer)
                return
            about = [f"{len(agent.seen().paths())} notes in {vault}", f"model {model}{f' at {url}' if url else ''}"]
            about += [f"{len(agent.rules)} privacy rule{'s' * (len(agent.rules) > 1)}"] if agent.rules else []
            about += ["read-only"] if read_only else []
            TerminalChat(agent, Console()).run(f"{', '.join(about)}; /help lists commands, Ctrl-D leaves")
    finally:
        opened.close()
