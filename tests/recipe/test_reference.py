"""The reference of keys is whole, described, and the page in docs/ is the one the schema gives."""

from pathlib import Path

import pytest

from posttrain.recipe.pages import markdown_reference
from posttrain.recipe.reference import keys_of
from posttrain.recipe.stages import STAGES, RlRecipe

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("stage", STAGES)
def test_every_key_is_described(stage):
    assert [key.path for key in keys_of(STAGES[stage]) if not key.description.strip()] == []


def test_keys_have_bounds_defaults_and_types():
    keys = {(key.path, key.variant): key for key in keys_of(RlRecipe)}
    assert keys["rollout.sampling.top_p", ""].allowed == "a number above 0 and at most 1"
    assert keys["evaluation.sampling.temperature", ""].default == "0.0"
    assert keys["rollout.sampling.temperature", ""].default == "1.0"
    assert keys["loss.clip_low", "gspo, gspo_token"].default == "0.0003"
    assert keys["environment.size", "frozen_lake"].allowed == "a whole number, 2 or more and at most 16"
    assert keys["environment.max_turns", "bandit"].default == "1"


def test_the_page_is_up_to_date():
    written = (ROOT / "docs" / "reference" / "recipes.md").read_text(encoding="utf-8")
    assert written == markdown_reference(), "run `posttrain recipe --markdown > docs/reference/recipes.md`"
