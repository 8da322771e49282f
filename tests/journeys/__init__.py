"""Journeys: the commands of a page, run in order, in an empty folder, on files in the format of the document's author.

Each file of this folder is a pytest module, collected through `python_files` in pyproject.toml. It has

- a generator of small files with the author's names and columns and with new texts;
- a quick test, which dry-runs the commands of its page;
- a slow test, which runs them and compares every output that the author names with what is expected.

The commands come from the page, so page and journey cannot differ. A journey may change the value of a word that a command
shows (`with_values`). It may not add a key. A model keeps the name that the page shows: `place_model` puts a tiny one under
this name into the folder, where a directory goes before a model of the hub.
"""

import contextlib
import io
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from tests.conftest import save_tiny_model

ROOT = Path(__file__).parent.parent.parent
DRY_RUN = ("rl", "sft", "reward", "dpo", "distill", "evaluate", "generate", "pipeline", "demo", "tune")
"""Commands that have `--dry-run`."""
NO_DRY_RUN = ("text", "reward")
"""Subcommands of `posttrain evaluate` that have none."""


def commands(page: str, section: str = "", program: str = "posttrain") -> list[str]:
    """The commands in the code blocks of a page, in order, each in one line.

    Args:
        page: path from the root of the checkout.
        section: a heading without its marks. Only the blocks of its section are read.
        program: first word of the commands.
    """
    text = (ROOT / page).read_text()
    if section:
        heading = re.search(rf"^(#+) {re.escape(section)}$", text, re.M)
        assert heading, f"{page} has no section {section!r}"
        text = re.split(rf"^#{{1,{len(heading[1])}}} ", text[heading.end() :], maxsplit=1, flags=re.M)[0]
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    lines = [line for block in blocks for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.removeprefix("$ ").startswith(f"{program} ")]


def with_values(command: str, values: Mapping[str, object]) -> str:
    """`command` with other values of keys (`steps=50`) and options (`--url URL`) that it shows; other commands are not changed.

    A value is changed wherever the key is shown, so that one mapping serves all commands of a page.
    """
    words = shlex.split(command)
    for place, word in enumerate(words):
        key, equals, _ = word.partition("=")
        if equals and key in values:
            words[place] = f"{key}={values[key]}"
        elif word.startswith("--") and word in values:
            words[place + 1] = str(values[word])
    return shlex.join(words)


def dry(command: str) -> str:
    """`command` with `--dry-run`, where it has one."""
    words = command.split()
    has = words[1] in DRY_RUN and words[1:3] not in [["evaluate", name] for name in NO_DRY_RUN]
    return command if not has or "--dry-run" in words else f"{command} --dry-run"


def run(command: str, code: int = 0) -> str:
    """Run a command of the command line in this process; returns what it printed. Its exit code must be `code`."""
    from posttrain.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        found = main(shlex.split(command)[1:])
    assert found == code, f"{command}\nended with {found}:\n{printed.getvalue()}"
    return printed.getvalue()


def place_model(folder: Path, name: str, architecture: str) -> None:
    """Put a tiny random model under the name of a hub model into `folder`."""
    save_tiny_model(folder / name, architecture)


def place_recipes(folder: Path) -> None:
    """Put the checkout's recipes where its pages expect them."""
    (folder / "recipes").symlink_to(ROOT / "recipes")
