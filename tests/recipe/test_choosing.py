"""Commands and overrides of docs/how-to/choose_an_algorithm.md resolve, and its links lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest

from posttrain.cli.main import main
from posttrain.planning.dry_run import batch_arithmetic
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.credit import CREDITS
from posttrain.recipe.loss import LOSSES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "how-to" / "choose_an_algorithm.md").read_text()
COMMANDS = [line.removeprefix("$ ") for line in PAGE.splitlines() if line.startswith("$ ")]
PROSE = re.sub(r"^```.*?^```$", "", PAGE, flags=re.M | re.S)
OVERRIDES = [words for words in re.findall(r"`([^`]+)`", PROSE) if re.match(r"\w+(\.\w+)+=", words)]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs(command, capsys):
    assert main(shlex.split(command)[1:]) == 0, capsys.readouterr()


def test_the_page_has_overrides_that_resolve():
    assert len(OVERRIDES) > 20
    for overrides in dict.fromkeys(OVERRIDES):
        batch_arithmetic(load_recipe([], ["environment.type=frozen_lake", *overrides.split()], "rl"))
    named = " ".join(OVERRIDES)
    assert all(name in CREDITS.names() for name in re.findall(r"credit\.type=(\w+)", named))
    assert all(name in LOSSES.names() for name in re.findall(r"loss\.type=(\w+)", named))
