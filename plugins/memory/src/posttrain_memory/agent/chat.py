"""A chat with the memory agent, in a terminal or one question per line. All output is without control characters."""

import sys
from collections.abc import Iterable
from contextlib import suppress

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.text import Text

from posttrain.errors import InputError, PosttrainError, RunError
from posttrain.terminal import printable
from posttrain_memory.agent.session import Event, MemoryAgent
from posttrain_memory.vault.limits import VaultError

_LINES = 40
"""Maximum number of lines shown of a result or a diff."""
_COLORS = {
    "thought": "dim", "code": "cyan", "result": "blue", "not understood": "yellow", "reply": "green", "no reply": "red",
}  # fmt: skip
_WITHHELD = "the privacy rules hide something"
_HELP = """\
/undo       undo the changes of the last question
/diff       show the changes of the last question
/notes      list the notes
/read PATH  show a note
/new        start a new conversation
/filters    show the privacy rules in force
/help       show this
/quit       leave (or Ctrl-D)
Ctrl-C interrupts an answer. <filter>…</filter> in a question is a privacy rule for that question only."""


class LeaveChat(Exception):
    """The user leaves the chat."""


def panel(event: Event) -> RenderableType:
    """The panel for an event."""
    text = printable(event.text)
    inside: RenderableType = Text(text, style="dim italic" if event.kind == "thought" else "")
    if event.kind == "code":
        inside = _highlighted(text, "python")
    elif event.kind == "result":
        inside = Text(_first_lines(text.removeprefix("<result>\n").removesuffix("\n</result>")))
    elif event.message:
        inside = Group(Text(text), Text(f"\n{_first_lines(printable(event.message.strip()), 8)}", style="dim"))
    return _framed(inside, event.kind, _COLORS[event.kind], _WITHHELD if event.withheld else None)


def _framed(inside: RenderableType, title: str, color: str, subtitle: str | None = None) -> Panel:
    panel = Panel(inside, title=title, title_align="left", border_style=color, padding=(0, 1))
    panel.subtitle, panel.subtitle_align = subtitle, "right"
    return panel


def _highlighted(text: str, language: str) -> Syntax:
    return Syntax(text, language, theme="ansi_dark", background_color="default", word_wrap=True)


def _first_lines(text: str, most: int = _LINES) -> str:
    rows = text.rstrip("\n").split("\n")
    more = [f"… {len(rows) - most} more lines"] if len(rows) > most else []
    return "\n".join([*rows[:most], *more])


def _command(agent: MemoryAgent, line: str) -> str:
    """Execute a line that begins with `/` and return its output. Raises InputError if it fails, and LeaveChat."""
    name, _, rest = line.partition(" ")
    if name == "/quit":
        raise LeaveChat
    try:
        match name:
            case "/new":
                agent.new()
                text = "the next question starts a new conversation"
            case "/undo":
                text = f"undone: {', '.join(agent.undo())}; the next question starts a new conversation"
            case "/diff":
                text = agent.changes() or "the last question changed nothing"
            case "/notes":
                text = agent.visible_vault().tree() or "there are no notes"
            case "/read" if rest.strip():
                text = agent.visible_vault().read(rest.strip())
            case "/read":
                raise InputError("/read needs the path of a note, for example /read user.md")
            case "/filters" if agent.rules:
                text = "\n".join(["for every question:", *(f"- {rule}" for rule in agent.rules)])
            case "/filters":
                text = "no privacy rule in force; start with --filter, or write <filter>…</filter> in a question"
            case "/help":
                text = _HELP
            case _:
                raise InputError(f"unknown command {name}; /help lists the commands")
    except VaultError as error:
        raise InputError(str(error)) from None
    except OSError as error:
        raise RunError(f"the vault cannot be read: {error.strerror or type(error).__name__}") from None
    return printable(text.rstrip("\n"))


def chat(agent: MemoryAgent, console: Console, about: str) -> None:
    """Answer questions that are typed in a terminal, until the user leaves. `about` is shown first."""
    with suppress(ImportError):
        import readline  # noqa: F401 - with it, `input` edits lines and remembers them
    console.print(Text(printable(about), style="dim"))
    while True:
        try:
            console.print()
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        try:
            if line.startswith("/"):
                console.print(Text(_command(agent, line)))
            elif line:
                _answer(agent, console, line)
        except LeaveChat:
            return
        except KeyboardInterrupt:
            console.print(Text("interrupted; the next question starts a new conversation", style="yellow"))
        except PosttrainError as error:
            console.print(Text(printable(str(error)), style="red"))


def _answer(agent: MemoryAgent, console: Console, question: str) -> None:
    """Show the events of a question as they occur, with the elapsed time below."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    try:
        with Progress(*columns, console=console, transient=True, refresh_per_second=8) as waiting:
            task = waiting.add_task("thinking", total=None)
            for event in agent.ask(question):
                waiting.console.print(panel(event))
                waiting.update(task, description="running code" if event.kind == "code" else "thinking")
    finally:
        if diff := agent.changes():
            inside = _highlighted(_first_lines(printable(diff)), "diff")
            console.print(_framed(inside, "changed notes", "magenta", "/undo takes it back"))


def answer_lines(agent: MemoryAgent, lines: Iterable[str]) -> None:
    """Answer one question or command per line, for scripts. All but replies goes to standard error.

    Raises RunError at the end if some had no answer.
    """
    console = Console(stderr=True)
    answered: list[bool] = []
    with suppress(LeaveChat):
        for line in filter(None, map(str.strip, lines)):
            try:
                answered.append(_answer_line(agent, console, line))
            except InputError as error:
                print(printable(str(error)), file=sys.stderr, flush=True)
                answered.append(False)
    if without := answered.count(False):
        raise RunError(f"{without} of {len(answered)} lines had no answer; the messages above say why")


def _answer_line(agent: MemoryAgent, console: Console, line: str) -> bool:
    """Whether there is a reply. Raises InputError, and LeaveChat."""
    if line.startswith("/"):
        print(_command(agent, line), flush=True)
        return True
    for event in agent.ask(line):
        if event.kind == "reply":
            print(printable(event.text), flush=True)
        if event.kind != "reply" or event.withheld:
            console.print(panel(event))
    if agent.changes():
        print("notes were changed; /diff shows how, and /undo takes it back", file=sys.stderr, flush=True)
    return event.kind == "reply"
