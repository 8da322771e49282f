"""The keys of asynchronous rollouts: keys without effect, and the plan."""

from posttrain.planning.dry_run import batch_arithmetic
from posttrain.planning.memory import ModelSizes, memory_estimate
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.plan import DEVICES, Placement
from posttrain.recipe.warnings import recipe_warnings

TINY = ModelSizes(1000, 2, 32, 64, 4, 2, 8, 400)


def test_keys_without_effect_are_reported():
    recipe = load_recipe([], ["rollout.on_new_weights=continue", "rollout.max_staleness=1"], "rl")
    found = [warning for warning in recipe_warnings(recipe) if "rollout.async_rollouts is 0" in warning]
    assert [note.split()[0] for note in found] == ["rollout.on_new_weights", "rollout.max_staleness"]
    evaluation = load_recipe([], ["rollout.async_rollouts=1"], "evaluate")
    assert any(warning.startswith("rollout.async_rollouts has no effect") for warning in recipe_warnings(evaluation))

    # Ratios to the rollout are clipped where episodes are of older weights.
    def clip_notes(*given):
        return [n for n in recipe_warnings(load_recipe([], ["loss.clip_low=0.1", *given], "rl")) if "clip" in n]

    assert clip_notes()
    assert clip_notes("rollout.async_rollouts=1")
    assert clip_notes("rollout.async_rollouts=1", "loss.old=rollout") == []


def test_the_plan_shows_asynchronous_rollouts_and_their_memory():
    given = ["rollout.async_rollouts=2", "learner.epochs_per_step=3", "rollout.groups_per_step=4"]
    given += ["learner.updates_per_step=2"]
    recipe = load_recipe([], given, "rl")
    assert recipe.updates_behind == 12
    (line,) = [line for line in batch_arithmetic(recipe) if "ahead of the learner" in line]
    assert "at most 2 steps ahead" in line
    assert "at most 12 optimizer steps old" in line
    plain = load_recipe([], given[1:], "rl")
    assert not [line for line in batch_arithmetic(plain) if "ahead of the learner" in line]
    key = "weights of asynchronous rollouts"
    assert key not in memory_estimate(plain, TINY)
    assert memory_estimate(recipe, TINY)[key][0] == 4 * 4 * 1000
    assert memory_estimate(recipe, TINY, Placement(2, 2), DEVICES["h100"])[key][0] == 4 * 1000
    newest = load_recipe([], [*given, "rollout.on_new_weights=continue"], "rl")
    assert memory_estimate(newest, TINY)[key][0] == 2 * 4 * 1000


def test_the_plan_counts_the_cache_and_weights_of_the_separate_engine():
    own, evaluations = "key/value cache of asynchronous rollouts, at most", "key/value cache, at most"
    local = memory_estimate(load_recipe([], ["rollout.async_rollouts=1"], "rl"), TINY)
    assert local[own][0] == local[evaluations][0] > 0
    assert own not in memory_estimate(load_recipe([], [], "rl"), TINY)
    outside = memory_estimate(load_recipe([], ["rollout.async_rollouts=1", "engine.type=vllm"], "rl"), TINY)
    assert own not in outside
    lora = load_recipe([], ["rollout.async_rollouts=1", "model.lora.rank=1"], "rl")
    here, there = (memory_estimate(lora, TINY, Placement(n, n))["weights of asynchronous rollouts"][0] for n in (1, 2))
    assert there - here == 4 * TINY.parameters
