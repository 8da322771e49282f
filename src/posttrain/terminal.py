"""Text from files, models and other people in the terminal: it cannot move the cursor, hide or reorder what you read."""

import re
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_FRAME = re.compile(r"(?:\x1b\[A)+|\r[^\x00-\x1f\x7f-\x9f]*\r?")
"""What a progress bar of a library writes: movements up, or a line without an end in place of the one before."""


def printable(text: str) -> str:
    """`text` with all characters escaped that act on a terminal or are invisible, except line ends, tabs and spaces.

    These are control characters (C0, C1, escape), bidirectional and zero-width marks, line separators and surrogates.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c in "\n\t" or c.isprintable() or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text.replace("\r\n", "\n")
    )


class _Escaped:
    """A text stream that writes `printable` text. Consoles of `new_console` escape their own text and bypass it."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream  # the name that rich looks for

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(text if _FRAME.fullmatch(text) else printable(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextmanager
def escaped_output() -> Iterator[None]:
    """Write `printable` text to standard output and standard error inside the block, also from libraries."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if getattr(stream, "encoding", None) == "ascii" and hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8")  # as click would, past this stream
    sys.stdout, sys.stderr = (stream and _Escaped(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def new_console(**options: Any) -> "Console":
    """A rich console with `options` that shows `printable` text."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class EscapingConsole(Console):
        @property
        def file(self) -> Any:
            file = Console.file.fget(self)  # type: ignore[attr-defined]
            return getattr(file, "rich_proxied_file", file)  # a live display wraps the stream once more

        @file.setter
        def file(self, new: Any) -> None:
            self._file = new

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=printable(segment.text))

    return EscapingConsole(**options)
