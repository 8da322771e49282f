"""The keys of the vLLM engine: what goes together, and what is refused in one sentence."""

import pytest

from posttrain.errors import InputError
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.engines import VllmEngineRecipe
from posttrain.recipe.warnings import recipe_warnings


def test_the_engine_of_each_stage_may_be_vllm():
    for stage in ("rl", "evaluate", "sft"):
        given = ["engine.type=vllm", "engine.servers=2", "engine.max_num_seqs=16"]
        recipe = load_recipe([], [*given, *(["environment.type=bandit"] if stage == "sft" else [])], stage)
        assert isinstance(recipe.engine, VllmEngineRecipe)
        assert recipe.engine.slots == 32


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["engine.mode=in_process", "engine.servers=2"], "`servers` has no effect with `mode: in_process`"),
        (["engine.urls=[http://a:1]", "engine.servers=2"], "set only one of them"),
        (["engine.urls=[a:1]"], "must begin with http"),
        (["engine.adapters=adapter_only"], "set `model.lora`"),
        (["rollout.sampling.temperature=0.7", "rollout.sampling.top_p=0.9"], "needs them after temperature only"),
    ],
)
def test_what_does_not_go_together_is_refused(given, words):
    with pytest.raises(InputError, match=words):
        load_recipe([], ["engine.type=vllm", *given], "rl")


def test_truncation_goes_with_temperature_one_and_adapters_with_lora():
    given = ["engine.type=vllm", "rollout.sampling.top_p=0.9", "engine.adapters=adapter_only", "model.lora.rank=4"]
    assert load_recipe([], given, "rl").rollout.sampling.top_p == 0.9


def test_notes_say_what_nothing_corrects_and_what_has_no_effect():
    recipe = load_recipe([], ["engine.type=vllm", "engine.urls=[http://a:1]", "engine.dtype=float32"], "rl")
    found = recipe_warnings(recipe)
    assert sum("set loss.correction.weights or loss.correction.reject" in note for note in found) == 1
    assert sum("engine.dtype has no effect" in note for note in found) == 1
    corrected = load_recipe([], ["engine.type=vllm", "loss.correction.weights=token"], "rl")
    assert not any("engine." in warning for warning in recipe_warnings(corrected))
