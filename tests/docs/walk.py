"""Walks through a page as a reader does: saves its files, executes its Python, runs its commands, in an empty folder."""

import contextlib
import io
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.journeys import run, with_values

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(?P<before>[^\n]*(?:\n[^\n]+)*)\n\n```(?P<language>\w+)\n(?P<text>.*?)^```", re.M | re.S)
"""A block of code with the paragraph before it."""
SAVED = re.compile(r"`([\w.]+\.(?:py|yaml))`")
"""A file name in the paragraph before a block, which says where to save it."""


def blocks(page: str) -> Iterator[tuple[str, str, str]]:
    """(language, file to save it as or "", text) of each block of `page`, a path from the root."""
    for match in BLOCK.finditer((ROOT / page).read_text(encoding="utf-8")):
        saved = SAVED.search(match["before"])
        save = saved is not None and bool(re.search(r"^`|[Ss]ave|into a file", match["before"], re.M))
        yield match["language"], saved[1] if saved and save else "", match["text"]


def commands_of(text: str) -> list[str]:
    """The commands of a console block, each in one line and without its comment."""
    lines = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
    return [re.sub(r"\s+# .*", "", line.removeprefix("$ ")) for line in lines if line.startswith("$ posttrain ")]


def answer(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Answer what commands ask on standard input with `lines`, then end it."""
    answers = iter(lines)

    def ask(*_: object) -> str:
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())))


def walk(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, smaller: Mapping[str, object]) -> str:
    """Do in `folder` what `page` says, with other values of the keys in `smaller`; returns what was printed."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    printed = []
    for language, file, text in blocks(page):
        if file:
            (folder / file).write_text(text, encoding="utf-8")
        elif language == "python":
            code = with_python_values(text, smaller)
            with contextlib.redirect_stdout(io.StringIO()) as said:
                exec(compile(code, page, "exec"), {"__name__": "__main__"})
            printed.append(said.getvalue())
        elif language == "console":
            for command in commands_of(text):
                answer(monkeypatch, *("/notes", "/quit") if " chat " in command else ("dragon", "3", "5") * 50)
                printed.append(run(with_values(command, smaller)))
    for name in ("reward", "guess_number", "larger"):
        sys.modules.pop(name, None)
    return "\n".join(printed)


def with_python_values(code: str, values: Mapping[str, object]) -> str:
    """`code` with other values where it says `range(20)` or `steps=2` as `values` has them."""
    for key, value in values.items():
        code = re.sub(rf"\b{re.escape(key)}=\d+", f"{key}={value}", code)
        if key == "range":
            code = re.sub(r"range\(\d+\)", f"range({value})", code)
    return code
