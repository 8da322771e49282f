"""The environment that the guide shows is the one that runs."""

from pathlib import Path

import pytest

from posttrain.recipe.components import environment_class, environment_recipe

ROOT = Path(__file__).parents[2]
EXAMPLE = "docs/examples/guess_number.py"


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_the_example_validates():
    recipe = environment_recipe({"type": EXAMPLE})
    environment_class(EXAMPLE).validate(recipe, range(200))


def test_too_few_turns_give_a_warning():
    recipe = environment_recipe({"type": EXAMPLE, "max_turns": 3})
    with pytest.raises(AssertionError, match="more than 3 turns"):
        environment_class(EXAMPLE).validate(recipe, range(50))


def test_the_example_keeps_the_protocol():
    game = environment_class(EXAMPLE)(environment_recipe({"type": EXAMPLE, "max_turns": 2}))
    assert game.reset(3) == game.reset(3)
    assert game.step("a lot").reward < 0
    last = game.step("0")
    assert (last.truncated, last.info) == (True, {"success": False})
    with pytest.raises(RuntimeError):
        game.step("1")


def test_the_guide_shows_that_file():
    assert (ROOT / EXAMPLE).read_text() in (ROOT / "docs/tutorials/own_environment.md").read_text()


def test_the_guide_names_every_key():
    from posttrain.recipe.components import environment_names

    guide = (ROOT / "docs/reference/environments.md").read_text()
    # The keys of other packages' environments are in the generated page of recipes.
    own = [name for name in environment_names() if ".adapters." not in environment_class(name).__module__]
    assert len(own) > 6
    for name in own:
        for key in set(environment_class(name).Recipe.model_fields) - {"type"}:
            assert f"`{key}`" in guide or f"`{key}." in guide, f"{name}: {key}"
