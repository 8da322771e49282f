"""Recipes by name: shipped ones, those of plug-ins, and local files before both."""

import sys
from pathlib import Path

import pytest

from posttrain import plugins
from posttrain.cli.main import main
from posttrain.errors import InputError
from posttrain.recipe import catalogue
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.pipeline import load_pipeline
from posttrain.recipe.study import load_study

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fresh():
    """Forget what entry points were found before and after."""
    for cached in (plugins.entry_points, catalogue.recipe_names):
        cached.cache_clear()
    yield
    for cached in (plugins.entry_points, catalogue.recipe_names):
        cached.cache_clear()


def test_every_shipped_recipe_has_a_name_and_a_summary():
    folder = ROOT / "recipes"
    files = {file.relative_to(folder).with_suffix("").as_posix(): file for file in folder.rglob("*.yaml")}
    named = {name: file.resolve() for name, file in catalogue.recipe_names().items()}
    assert {name: file for name, file in named.items() if file.is_relative_to(folder)} == files
    assert all(catalogue.summary(file) for file in named.values())


def test_a_name_is_read_from_any_folder_unless_a_local_file_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_recipe(["ragen/bandit"], [], "rl").environment.type == "bandit"
    assert load_recipe(["ragen/bandit.yaml"], [], "rl").environment.type == "bandit"
    assert [stage.name for stage in load_pipeline("demo/pipeline", []).stages]
    assert load_study("rlhf/tune_sft", []).trained == "sft"
    with pytest.raises(InputError, match=r"no recipe file ragen/bandits; did you mean ragen/bandit\b"):
        load_recipe(["ragen/bandits"], [], "rl")
    (tmp_path / "ragen").mkdir()
    (tmp_path / "ragen" / "bandit").write_text("steps: 3\n")
    assert load_recipe(["ragen/bandit"], [], "rl").steps == 3


def test_a_plugin_adds_recipes(tmp_path, monkeypatch, fresh):
    folder = tmp_path / "maze_recipes_package" / "recipes"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder.parent / "__init__.py").touch()
    (folder / "small.yaml").write_text("# A small maze. For tests.\nstage: rl\nsteps: 7\n")
    about = tmp_path / "maze_wheel-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: maze-wheel\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[posttrain.recipes]\nmaze = maze_recipes_package.recipes\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins.entry_points.cache_clear()
    catalogue.recipe_names.cache_clear()
    assert load_recipe(["maze/small"], [], "rl").steps == 7
    assert catalogue.summary(catalogue.recipe_file("maze/small")) == "A small maze."
    sys.modules.pop("maze_recipes_package", None)


def test_the_command_lists_and_plans_recipes_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["recipe", "list"]) == 0
    assert "demo/pipeline" in capsys.readouterr().out
    assert main(["rl", "--recipe", "ragen/bandit", "--dry-run"]) == 0
    named = capsys.readouterr().out
    assert main(["rl", "--recipe=ragen/bandit", "--dry-run"]) == 0
    assert capsys.readouterr().out == named != ""
