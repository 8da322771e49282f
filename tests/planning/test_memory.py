"""The recipes of the memory agent: they resolve, and the check names what made the published run collapse."""

import pytest

from posttrain.errors import InputError
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.warnings import recipe_warnings


def published(*overrides):
    return load_recipe(["memory/gspo_published"], list(overrides), "rl")


def test_the_published_run_has_the_published_algorithm():
    recipe = published()
    kl, loss = recipe.kl, recipe.loss
    assert (recipe.credit.type, loss.type, loss.clip_high, kl.estimator, kl.apply_to) == (
        "grpo",
        "gspo",
        0.1,
        "k3",
        "loss",
    )
    assert recipe.environment.max_turns == 8


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("credit.discount=0.99", "no key credit.discount; it belongs to credit.type .*gae.*, not grpo"),
        ("ptx.coefficient=0.13", "ptx.data is missing; set ptx.data"),
    ],
)
def test_keys_that_had_no_effect_there_are_refused(key, problem):
    with pytest.raises(InputError, match=problem):
        published(key)


def test_the_corrected_recipe_gives_no_warnings():
    found = recipe_warnings(load_recipe(["memory/gspo"], [], "rl"))
    assert not any("clips" in note or "updates on the same episodes" in note or "kl.horizon" in note for note in found)
