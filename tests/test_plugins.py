"""Plug-ins from other distributions: environments and commands by entry points, and clear errors for broken ones."""

import subprocess
import sys
from importlib import metadata
from typing import get_args

import pytest

from posttrain import plugins
from posttrain.cli.main import main
from posttrain.errors import InputError
from posttrain.recipe.components import environment_class, environment_classes, environment_names

MAZE = """
import typer
from posttrain.environments.bandit import Bandit

class Maze(Bandit):
    \"\"\"A maze.\"\"\"

app = typer.Typer(help="Commands of the maze.")

@app.command()
def walk(steps: int = 1) -> None:
    \"\"\"Walk through the maze.\"\"\"
    typer.echo(f"{steps} steps")

@app.command()
def leave() -> None:
    \"\"\"Leave the maze.\"\"\"

def mazes(count: int = 2) -> None:
    \"\"\"Write mazes.\"\"\"
    typer.echo(f"{count} mazes")
"""
NEEDS = "import no_such_module_anywhere\n"
POINTS = """
[posttrain.environments]
maze = maze_plugin:Maze
needy = needy_plugin:Needy

[posttrain.commands]
maze = maze_plugin:app
data.mazes = maze_plugin:mazes
needy = needy_plugin:app
"""
METADATA = """Metadata-Version: 2.1
Name: maze-wheel
Version: 1.0
Provides-Extra: walls
Provides-Extra: all
Requires-Dist: no-such-module-anywhere>=2; extra == "all"
Requires-Dist: no_such.module-anywhere>=2; extra == "walls"
"""


def install(folder, name, points, **modules):
    """Write a distribution as an installed wheel would be."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA.replace("maze-wheel", name))
    (info / "entry_points.txt").write_text(points)
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)


@pytest.fixture
def maze(tmp_path, monkeypatch):
    """A distribution with a sound plug-in and one whose optional dependency is missing."""
    install(tmp_path, "maze-wheel", POINTS, maze_plugin=MAZE, needy_plugin=NEEDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    for cached in (plugins.entry_points, plugins.load):
        cached.cache_clear()
    yield tmp_path
    for cached in (plugins.entry_points, plugins.load):
        cached.cache_clear()
    for module in ("maze_plugin", "needy_plugin"):
        sys.modules.pop(module, None)


def test_an_environment_is_loaded_by_name_and_a_missing_dependency_is_one_sentence_with_its_extra(maze):
    assert environment_class("maze").__name__ == "Maze"
    assert {"maze", "needy", "bandit"} <= set(environment_names())
    with pytest.raises(InputError) as raised:
        environment_class("needy")
    message = str(raised.value)
    assert "\n" not in message
    for part in ("maze-wheel", "needy = needy_plugin:Needy", "pip install 'maze-wheel[walls]'"):
        assert part in message
    assert "needy" not in environment_classes()
    assert "maze" in environment_classes()


def test_extras_with_a_missing_requirement_are_listed(maze):
    assert plugins.pip_command("some_module.part") == "pip install some-module"
    assert plugins.missing_extras("maze-wheel") == ["walls"]
    install(maze, "no-such-module-anywhere", "")
    assert plugins.missing_extras("maze-wheel") == []
    assert plugins.missing_extras("no-such-distribution") == []


def test_any_other_failure_names_the_distribution(maze):
    (maze / "needy_plugin.py").write_text("raise ValueError('two\\nlines')\n")
    with pytest.raises(InputError, match=r"maze-wheel.* ValueError: two lines") as raised:
        plugins.load("posttrain.environments", "needy")
    assert "\n" not in str(raised.value)
    # A name of two distributions is refused.
    install(maze, "other-wheel", "[posttrain.environments]\nmaze = other:Maze\n")
    with pytest.raises(InputError, match="other:Maze"):
        environment_class("maze")


def test_commands_of_plug_ins_run_and_are_listed(maze, capsys):
    assert main(["maze", "walk", "--steps", "3"]) == 0
    assert main(["data", "mazes"]) == 0
    assert capsys.readouterr().out == "3 steps\n2 mazes\n"
    for words, shown in ((["--help"], "Commands of the maze."), (["data", "--help"], "Write mazes.")):
        assert main(words) == 0
        assert shown in capsys.readouterr().out
    assert main(["data.mazes"]) == 2
    # A broken command does not break others.
    capsys.readouterr()
    assert main(["needy", "anything", "--help"]) == 2
    assert "pip install 'maze-wheel[walls]'" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "Unavailable" in capsys.readouterr().out
    assert main(["env", "list", "--help"]) == 0


def test_a_plug_in_is_imported_only_when_its_name_is_used():
    code = (
        "import sys; from posttrain.cli.main import main; main(['data', 'convert', '--help']); "
        "main(['--help']); from posttrain.recipe.components import environment_names; environment_names(); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip().endswith("[]")


def test_the_groups_of_the_plug_ins_of_this_repository_are_known():
    for name in ("environments", "import", "memory"):
        declared = {point.group for point in metadata.distribution(f"posttrain-{name}").entry_points}
        assert {"posttrain.commands"} <= declared <= set(get_args(plugins.Group))
