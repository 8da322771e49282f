"""The screen of a terminal of a given width: a command runs in a pseudo-terminal, and pyte draws the screen."""

import fcntl
import os
import pty
import struct
import sys
import termios
from multiprocessing.connection import Connection
from pathlib import Path

import pyte

from tests.training.small import fork_server

_HEIGHT = 30


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
    """Exit code and lines of `posttrain` with these words, in a pseudo-terminal.

    The process is forked from the server of `tests.training.small`, so it does not import torch again.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _HEIGHT, width, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    with Connection(theirs) as terminal:
        given = terminal, list(map(str, words)), environment | {"TERM": "xterm-256color"}, folder or Path.cwd()
        process = fork_server().Process(target=_child, args=given)
        process.start()
    os.write(ours, typed.encode())
    output = b""
    try:
        while piece := os.read(ours, 65536):
            output += piece
    except OSError:  # The command has ended.
        pass
    os.close(ours)
    process.join()
    assert process.exitcode is not None
    return process.exitcode, lines_of(output.decode(), width)


def _child(terminal: Connection, words: list[str], environment: dict[str, str], folder: Path) -> None:
    os.setsid()
    for number in range(3):
        os.dup2(terminal.fileno(), number)
    terminal.close()
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, closefd=False)  # noqa: SIM115
        for number, mode in enumerate("rww")
    )
    os.environ.clear()
    os.environ |= environment
    os.chdir(folder)
    from transformers.utils import logging

    from posttrain.cli.main import main

    logging.set_verbosity_error()  # the command line says so before it imports transformers
    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
