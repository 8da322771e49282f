"""A chat with a memory agent: in a terminal with panels, or line by line for scripts."""

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from posttrain.agents.panels import changed, lines, panel, visible
from posttrain.agents.session import Code, GaveUp, MemoryAgent, Said
from posttrain.environments.memory.limits import VaultError
from posttrain.errors import InputError, PosttrainError, RunError

_HELP = """\
/undo       take back what the last question changed
/diff       show what the last question changed
/notes      list the notes
/read PATH  show a note
/new        begin a new conversation
/filters    show the privacy rules that hold
/help       show this
/quit       leave; so does Ctrl-D
Ctrl-C interrupts an answer. <filter>…</filter> in a question is a privacy rule for that question alone."""


class Leave(Exception):
    """The user wants to go."""


def command(agent: MemoryAgent, line: str) -> str:
    """What a line that begins with `/` does and says. InputError where it cannot be done; raises Leave to end."""
    name, _, rest = line.partition(" ")
    does: dict[str, Callable[[], str]] = {
        "/undo": lambda: f"taken back: {', '.join(agent.undo())}; the next question begins a new conversation",
        "/diff": lambda: agent.changes() or "the last question changed nothing",
        "/notes": lambda: agent.seen().tree() or "there are no notes",
        "/read": lambda: agent.seen().read(rest.strip()),
        "/new": lambda: _new(agent),
        "/filters": lambda: _rules(agent),
        "/help": lambda: _HELP,
        "/quit": _leave,
    }
    if name not in does:
        raise InputError(f"there is no command {name}; /help lists them")
    if name == "/read" and not rest.strip():
        raise InputError("/read takes the path of a note, for example /read user.md")
    try:
        return visible(does[name]().rstrip("\n"))
    except VaultError as error:
        raise InputError(str(error)) from None
    except OSError as error:
        raise RunError(f"the memory cannot be read: {error.strerror or type(error).__name__}") from None


class TerminalChat:
    """Questions typed in a terminal, answers in panels."""

    def __init__(self, agent: MemoryAgent, console: Console) -> None:
        self._agent, self._console = agent, console

    def run(self, about: str) -> None:
        """Answer until the user leaves. `about` is shown first."""
        with suppress(ImportError):
            import readline  # noqa: F401 - with it, `input` edits lines and remembers them
        self._console.print(Text(visible(about), style="dim"))
        while True:
            try:
                self._console.print()
                line = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return
            try:
                self._take(line)
            except Leave:
                return
            except KeyboardInterrupt:
                self._console.print(Text("interrupted; the next question begins a new conversation", style="yellow"))
            except PosttrainError as error:
                self._console.print(Text(visible(str(error)), style="red"))

    def _take(self, line: str) -> None:
        if line.startswith("/"):
            self._console.print(Text(command(self._agent, line)))
        elif line:
            self._answer(line)

    def _answer(self, question: str) -> None:
        """Show the events of a question as they come, below them how long it has taken so far."""
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
    """One question or command a line, for scripts: replies go to standard output, all else to standard error."""

    def __init__(self, agent: MemoryAgent) -> None:
        self._agent = agent

    def run(self, asked: Iterable[str]) -> None:
        """Answer every line; RunError at the end where some had no answer."""
        count = without = 0
        for line in asked:
            if not line.strip():
                continue
            count += 1
            try:
                answered = self._take(line.strip())
            except Leave:
                break
            except InputError as error:
                _note(str(error))
                answered = False
            without += not answered
        if without:
            raise RunError(f"{without} of {count} lines had no answer; the messages above say why")

    def _take(self, line: str) -> bool:
        if line.startswith("/"):
            print(command(self._agent, line), flush=True)
            return True
        for event in self._agent.ask(line):
            print(lines(event), file=sys.stdout if isinstance(event, Said) else sys.stderr, flush=True)
        if self._agent.changes():
            _note("notes were changed; /diff shows how, and /undo takes it back")
        return not isinstance(event, GaveUp)


def _note(text: str) -> None:
    print(visible(text), file=sys.stderr, flush=True)


def _rules(agent: MemoryAgent) -> str:
    if not agent.rules:
        return "no privacy rule holds; start with --filter, or write <filter>…</filter> in a question"
    return "\n".join(["for every question:", *(f"- {rule}" for rule in agent.rules)])


def _new(agent: MemoryAgent) -> str:
    agent.new()
    return "the next question begins a new conversation"


def _leave() -> str:
    raise Leave
