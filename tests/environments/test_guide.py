"""The environment that the guide shows is the one that runs."""

from pathlib import Path

import pytest

from posttrain.recipe.components import environment_class, environment_names, environment_recipe

ROOT = Path(__file__).parents[2]
EXAMPLE = "docs/examples/guess_number.py"


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_the_example_of_the_guide_validates_and_keeps_the_protocol():
    recipe = environment_recipe({"type": EXAMPLE})
    environment_class(EXAMPLE).validate(recipe, range(200))
    recipe = environment_recipe({"type": EXAMPLE, "max_turns": 3})
    with pytest.raises(AssertionError, match="more than 3 turns"):
        environment_class(EXAMPLE).validate(recipe, range(50))
    game = environment_class(EXAMPLE)(environment_recipe({"type": EXAMPLE, "max_turns": 2}))
    assert game.reset(3) == game.reset(3)
    assert game.step("a lot").reward < 0
    last = game.step("0")
    assert (last.truncated, last.info) == (True, {"success": False})
    with pytest.raises(RuntimeError):
        game.step("1")
    assert (ROOT / EXAMPLE).read_text() in (ROOT / "docs/tutorials/own_environment.md").read_text()


def test_the_reference_names_every_environment_and_key():
    guide = "".join((ROOT / f"docs/{page}.md").read_text() for page in ("reference/environments", "how-to/adapters"))
    keys = (ROOT / "docs/reference/recipes.md").read_text()
    for name in environment_names():
        assert f"`{name}`" in guide
        for key in set(environment_class(name).Recipe.model_fields) - {"type"}:
            assert f"`environment.{key}`" in keys or f"`environment.{key}." in keys, f"{name}: {key}"
