"""The recipes of the memory agent: they resolve, and the check names what made the published run collapse."""

import pytest

from posttrain.errors import InputError
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.warnings import recipe_warnings


def published(*overrides):
    return load_recipe(["memory/gspo_published"], list(overrides), "rl")


def test_the_published_run_has_the_published_numbers():
    recipe = published()
    rollout, learner = recipe.rollout, recipe.learner
    assert rollout.groups_per_step * rollout.episodes_per_group == 128
    assert learner.updates_per_step * learner.epochs_per_step == 40
    kl, loss = recipe.kl, recipe.loss
    assert (recipe.credit.type, loss.type, loss.clip_low, loss.clip_high) == ("grpo", "gspo", 0.1, 0.1)
    assert (kl.coefficient, kl.target, kl.horizon, kl.estimator, kl.apply_to) == (0.1, 0.02, 256, "k3", "loss")
    assert recipe.optimizer.learning_rate == 1e-6
    assert (rollout.tokens_per_episode, recipe.environment.max_turns) == (5120, 8)


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("credit.discount=0.99", "no key credit.discount; it belongs to credit.type .*gae.*, not grpo"),
        ("ptx.coefficient=0.13", "would have no effect"),
    ],
)
def test_keys_that_had_no_effect_there_are_refused(key, problem):
    with pytest.raises(InputError, match=problem):
        published(key)


def test_the_corrected_recipe_gives_no_warnings():
    found = recipe_warnings(load_recipe(["memory/gspo"], [], "rl"))
    assert not any("clips" in note or "updates on the same episodes" in note or "kl.horizon" in note for note in found)
