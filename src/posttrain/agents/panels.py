"""What a person sees of an agent's events: panels in a terminal, lines elsewhere. Nothing steers the terminal."""

import unicodedata

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.syntax import Syntax
from rich.text import Text

from posttrain.agents.session import Code, Event, GaveUp, Refused, Result, Said, Thought

_LINES = 40
"""Most lines of a result, a change or a refused message that a panel shows."""
_WITHHELD = "something is withheld by the privacy rules"


def visible(text: str) -> str:
    """`text` without signs that steer a terminal or hide: controls, escapes, signs that turn the direction of writing."""
    lines = text.replace("\r\n", "\n").expandtabs(4)
    return "".join("�" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co") and c != "\n" else c for c in lines)


def panel(event: Event) -> RenderableType:
    """The panel of an event."""
    match event:
        case Thought(text):
            return _framed(Text(visible(text), style="dim italic"), "thought", "dim")
        case Code(text):
            return _framed(_coloured(visible(text), "python"), "code", "cyan")
        case Result(text):
            return _framed(Text(_first(visible(_inside(text)))), "result", "blue")
        case Refused(reason, message):
            said = Text(f"\n{_first(visible(message.strip()), 8)}", style="dim")
            return _framed(Group(Text(visible(reason)), said), "not understood", "yellow")
        case Said(text, withheld):
            return _framed(Text(visible(text)), "reply", "green", _WITHHELD if withheld else None)
        case GaveUp(reason):
            return _framed(Text(visible(reason)), "no reply", "red")


def changed(diff: str) -> RenderableType:
    """A panel with what a question changed."""
    return _framed(_coloured(_first(visible(diff)), "diff"), "changed notes", "magenta", "/undo takes it back")


def lines(event: Event) -> str:
    """An event as plain lines, each with the name of the event in front; a reply without."""
    match event:
        case Thought(text):
            return _marked("thought", text)
        case Code(text):
            return _marked("code", text)
        case Result(text):
            return _marked("result", _inside(text))
        case Refused(reason, message):
            return f"{_marked('refused', reason)}\n{_marked('message', message.strip())}"
        case Said(text, withheld):
            return visible(text) + (f"\n({_WITHHELD})" if withheld else "")
        case GaveUp(reason):
            return _marked("no reply", reason)


def _framed(inside: RenderableType, title: str, colour: str, subtitle: str | None = None) -> Panel:
    return Panel(
        inside,
        title=title,
        title_align="left",
        subtitle=subtitle,
        subtitle_align="right",
        border_style=colour,
        padding=(0, 1),
    )


def _coloured(text: str, language: str) -> Syntax:
    return Syntax(text, language, theme="ansi_dark", background_color="default", word_wrap=True)


def _inside(result: str) -> str:
    """A result without its tags."""
    return result.removeprefix("<result>\n").removesuffix("\n</result>")


def _first(text: str, most: int = _LINES) -> str:
    rows = text.rstrip("\n").split("\n")
    more = [f"… {len(rows) - most} more lines"] if len(rows) > most else []
    return "\n".join([*rows[:most], *more])


def _marked(name: str, text: str) -> str:
    return "\n".join(f"{name} | {row}".rstrip() for row in visible(text).split("\n"))
