"""The keys of the vLLM engine: valid combinations, and warnings."""

import pytest

from posttrain.recipe.compose import load_recipe
from posttrain.recipe.engines import VllmEngineRecipe
from posttrain.recipe.warnings import recipe_warnings

COOL = ["rollout.sampling.temperature=0.7", "rollout.sampling.top_p=0.95"]
"""The sampling of the agent recipes."""


def test_the_engine_of_each_stage_may_be_vllm():
    for stage in ("rl", "evaluate", "sft"):
        given = ["engine.type=vllm", "engine.servers=2", "engine.max_num_seqs=16"]
        recipe = load_recipe([], [*given, *(["environment.type=bandit"] if stage == "sft" else [])], stage)
        assert isinstance(recipe.engine, VllmEngineRecipe)
        assert recipe.engine.slots == 32
    given = ["engine.type=vllm", "engine.adapters=adapter_only", "model.lora.rank=4"]
    assert load_recipe([], given, "rl").engine.adapters == "adapter_only"


@pytest.mark.parametrize(
    ("sampling", "truncated"),
    [(COOL, True), (COOL[:1], False), (COOL[1:], False), (["rollout.sampling.temperature=0", COOL[1]], False)],
)
def test_log_probabilities_of_the_truncated_distribution_are_announced(sampling, truncated):
    given = ["engine.type=vllm", "loss.correction.weights=token", *sampling]
    warnings = recipe_warnings(load_recipe([], given, "rl"))
    assert any("of the truncated distribution" in warning for warning in warnings) is truncated
    local = recipe_warnings(load_recipe([], sampling, "rl"))
    assert not any("of the truncated distribution" in warning for warning in local)


def test_warnings_name_uncorrected_differences_and_keys_without_effect():
    recipe = load_recipe([], ["engine.type=vllm", "engine.urls=[http://a:1]", "engine.dtype=float32"], "rl")
    found = recipe_warnings(recipe)
    assert sum("set loss.correction.weights or loss.correction.reject" in note for note in found) == 1
    assert sum("engine.dtype has no effect" in note for note in found) == 1
    corrected = load_recipe([], ["engine.type=vllm", "loss.correction.weights=token"], "rl")
    assert not any("engine." in warning for warning in recipe_warnings(corrected))
