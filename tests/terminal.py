"""The screen of a terminal of a given width: a command runs in a pseudo-terminal, and pyte draws the screen."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pyte

_HEIGHT = 30
COMMAND = [sys.executable, "-c", "import sys; from posttrain.cli.main import main; sys.exit(main())"]


def lines_of(output: str, width: int) -> list[str]:
    """The lines on the screen and above it after `output`, without empty ones at the end."""
    screen = pyte.HistoryScreen(width, _HEIGHT, history=10_000)
    pyte.Stream(screen).feed(output.replace("\r\n", "\n").replace("\n", "\r\n"))
    above = ["".join(line[column].data for column in range(width)) for line in screen.history.top]
    lines = [line.rstrip() for line in [*above, *screen.display]]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def in_terminal(*words: object, width: int, typed: str = "", folder: Path | None = None) -> tuple[int, list[str]]:
    """Exit code and lines of `posttrain` with these words, in a pseudo-terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _HEIGHT, width, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [*COMMAND, *map(str, words)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment | {"TERM": "xterm-256color"},
        cwd=folder,
        start_new_session=True,
    )
    os.close(theirs)
    os.write(ours, typed.encode())
    output = b""
    try:
        while piece := os.read(ours, 65536):
            output += piece
    except OSError:  # The command has ended.
        pass
    os.close(ours)
    return process.wait(), lines_of(output.decode(), width)
