"""What gives the returns of a run, by which tables keep returns apart that are not comparable."""

import pytest

from posttrain.recipe.rollout import return_source
from posttrain.recipe.stages import DpoRecipe, RlRecipe

WEIGHTED = {"function": "contains", "weight": 0.5}
TEXT = {"type": "text_task", "prompts": "prompts.jsonl"}


@pytest.mark.parametrize(
    ("keys", "source"),
    [
        ({"environment": {"type": "bandit"}}, "bandit"),
        ({"environment": TEXT | {"reward": ["exact", WEIGHTED]}}, "text_task (exact, 0.5 x contains)"),
        ({"environment": TEXT | {"reward": "exact", "score_weight": 0}, "reward": {"path": "rm"}}, "reward model rm"),
        (
            {"environment": TEXT | {"reward": "exact", "score_weight": 0.5}, "reward": {"path": "rm"}},
            "0.5 x text_task (exact) + reward model rm",
        ),
        ({"environment": TEXT, "reward": {"path": "rm", "normalize": "none"}}, "reward model rm, raw"),
        ({"environment": TEXT, "reward": {"path": "rm", "clip": None}}, "reward model rm, not clipped"),
        ({"environment": TEXT, "reward": {"path": "rm", "clip": 2.5}}, "reward model rm, clipped to 2.5"),
    ],
)
def test_the_name_has_all_that_changes_a_return(keys, source):
    recipe = RlRecipe.model_validate({"name": "run", **keys})
    assert return_source(recipe) == source
    if "reward" in keys:
        assert "reward model" not in return_source(recipe, by_model=False)


def test_a_recipe_without_episodes_has_no_returns():
    assert return_source(DpoRecipe.model_validate({"name": "run", "data": {"train": "pairs.jsonl"}})) == ""
