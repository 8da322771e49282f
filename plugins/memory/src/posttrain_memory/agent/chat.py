"""A chat with the memory agent: in a terminal with panels, or line by line for scripts. Terminal control characters
are removed from all output.
"""

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.text import Text

from posttrain.errors import InputError, PosttrainError, RunError
from posttrain.terminal import printable
from posttrain_memory.agent.session import Answered, Code, Event, GaveUp, MemoryAgent, Refused, Result, Thought
from posttrain_memory.vault.limits import VaultError

_LINES = 40
"""Maximum number of lines shown of a result, a diff or a rejected message."""
_WITHHELD = "the privacy rules hide something"


def panel(event: Event) -> RenderableType:
    """The panel for an event."""
    match event:
        case Thought(text):
            return _framed(Text(printable(text), style="dim italic"), "thought", "dim")
        case Code(text):
            return _framed(_highlighted(printable(text), "python"), "code", "cyan")
        case Result(text):
            return _framed(Text(_first_lines(printable(_without_tags(text)))), "result", "blue")
        case Refused(reason, message):
            excerpt = Text(f"\n{_first_lines(printable(message.strip()), 8)}", style="dim")
            return _framed(Group(Text(printable(reason)), excerpt), "not understood", "yellow")
        case Answered(text, withheld):
            return _framed(Text(printable(text)), "reply", "green", _WITHHELD if withheld else None)
        case GaveUp(reason):
            return _framed(Text(printable(reason)), "no reply", "red")


def changed(diff: str) -> RenderableType:
    """A panel with the changes made by a question."""
    inside = _highlighted(_first_lines(printable(diff)), "diff")
    return _framed(inside, "changed notes", "magenta", "/undo takes it back")


def lines(event: Event) -> str:
    """An event as plain lines, prefixed by its name; a reply has no prefix."""
    match event:
        case Thought(text):
            return _prefixed("thought", text)
        case Code(text):
            return _prefixed("code", text)
        case Result(text):
            return _prefixed("result", _without_tags(text))
        case Refused(reason, message):
            return f"{_prefixed('refused', reason)}\n{_prefixed('message', message.strip())}"
        case Answered(text, withheld):
            return printable(text) + (f"\n({_WITHHELD})" if withheld else "")
        case GaveUp(reason):
            return _prefixed("no reply", reason)


def _framed(inside: RenderableType, title: str, color: str, subtitle: str | None = None) -> Panel:
    panel = Panel(inside, title=title, title_align="left", border_style=color, padding=(0, 1))
    panel.subtitle, panel.subtitle_align = subtitle, "right"
    return panel


def _highlighted(text: str, language: str) -> Syntax:
    return Syntax(text, language, theme="ansi_dark", background_color="default", word_wrap=True)


def _without_tags(result: str) -> str:
    """A result without its tags."""
    return result.removeprefix("<result>\n").removesuffix("\n</result>")


def _first_lines(text: str, most: int = _LINES) -> str:
    rows = text.rstrip("\n").split("\n")
    more = [f"… {len(rows) - most} more lines"] if len(rows) > most else []
    return "\n".join([*rows[:most], *more])


def _prefixed(name: str, text: str) -> str:
    return "\n".join(f"{name} | {row}".rstrip() for row in printable(text).split("\n"))


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


def command(agent: MemoryAgent, line: str) -> str:
    """Execute a line that begins with `/` and return its output. Raises InputError if it fails, and Leave to end the
    chat.
    """
    name, _, rest = line.partition(" ")
    does: dict[str, Callable[[], str]] = {
        "/undo": lambda: f"undone: {', '.join(agent.undo())}; the next question starts a new conversation",
        "/diff": lambda: agent.changes() or "the last question changed nothing",
        "/notes": lambda: agent.visible_vault().tree() or "there are no notes",
        "/read": lambda: agent.visible_vault().read(rest.strip()),
        "/filters": lambda: (
            "\n".join(["for every question:", *(f"- {rule}" for rule in agent.rules)])
            if agent.rules
            else "no privacy rule in force; start with --filter, or write <filter>…</filter> in a question"
        ),
        "/help": lambda: _HELP,
    }
    if name == "/quit":
        raise LeaveChat
    if name == "/new":
        agent.new()
        return "the next question starts a new conversation"
    if name not in does:
        raise InputError(f"unknown command {name}; /help lists the commands")
    if name == "/read" and not rest.strip():
        raise InputError("/read needs the path of a note, for example /read user.md")
    try:
        return printable(does[name]().rstrip("\n"))
    except VaultError as error:
        raise InputError(str(error)) from None
    except OSError as error:
        raise RunError(f"the vault cannot be read: {error.strerror or type(error).__name__}") from None


class TerminalChat:
    """Questions typed in a terminal, answers in panels."""

    def __init__(self, agent: MemoryAgent, console: Console) -> None:
        self._agent, self._console = agent, console

    def run(self, about: str) -> None:
        """Answer questions until the user leaves. `about` is shown first."""
        with suppress(ImportError):
            import readline  # noqa: F401 - with it, `input` edits lines and remembers them
        self._console.print(Text(printable(about), style="dim"))
        while True:
            try:
                self._console.print()
                line = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return
            try:
                if line.startswith("/"):
                    self._console.print(Text(command(self._agent, line)))
                elif line:
                    self._answer(line)
            except LeaveChat:
                return
            except KeyboardInterrupt:
                self._console.print(Text("interrupted; the next question starts a new conversation", style="yellow"))
            except PosttrainError as error:
                self._console.print(Text(printable(str(error)), style="red"))

    def _answer(self, question: str) -> None:
        """Show the events of a question as they occur, with the elapsed time below."""
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        try:
            with Progress(*columns, console=self._console, transient=True, refresh_per_second=8) as waiting:
                task = waiting.add_task("thinking", total=None)
                for event in self._agent.ask(question):
                    waiting.console.print(panel(event))
                    waiting.update(task, description="running code" if isinstance(event, Code) else "thinking")
        finally:
            if diff := self._agent.changes():
                self._console.print(changed(diff))


class LineChat:
    """One question or command per line, for scripts: replies go to standard output, everything else to standard
    error.
    """

    def __init__(self, agent: MemoryAgent) -> None:
        self._agent = agent

    def run(self, asked: Iterable[str]) -> None:
        """Answer every line. Raises RunError at the end if some had no answer."""
        count = without = 0
        for line in asked:
            if not line.strip():
                continue
            count += 1
            try:
                answered = self._handle(line.strip())
            except LeaveChat:
                break
            except InputError as error:
                _note(str(error))
                answered = False
            without += not answered
        if without:
            raise RunError(f"{without} of {count} lines had no answer; the messages above say why")

    def _handle(self, line: str) -> bool:
        if line.startswith("/"):
            print(command(self._agent, line), flush=True)
            return True
        for event in self._agent.ask(line):
            print(lines(event), file=sys.stdout if isinstance(event, Answered) else sys.stderr, flush=True)
        if self._agent.changes():
            _note("notes were changed; /diff shows how, and /undo takes it back")
        return not isinstance(event, GaveUp)


def _note(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
