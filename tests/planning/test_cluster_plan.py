"""Plans: placement on described clusters, idle time, and the published placements on 8 GPUs."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from posttrain.errors import InputError
from posttrain.planning.cluster import advised, idle_words, show_placement
from posttrain.planning.devices import DEVICES
from posttrain.planning.model_sizes import published_sizes
from posttrain.planning.placed_phases import memory_of, placed_phases
from posttrain.planning.work import Episodes, rows_of
from posttrain.planning.workers import Node, described, living, place, workers_of
from posttrain.recipe.compose import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
H100 = DEVICES["h100"]
QWEN3_4B = published_sizes("Qwen3-4B")
PUBLISHED = {
    "rlhf/ppo": ("rlhf/ppo_8gpu_published", "rl", "6 of 8 GPUs are idle"),
    "rlhf/drca": ("rlhf/drca_8gpu_published", "rl", "during: scoring"),
    "rlhf/sft": ("rlhf/sft_8gpu_published", "sft", "8 of 8 GPUs are idle during: optimizer"),
    "rlhf/dpo": ("rlhf/dpo_8gpu_published", "dpo", "8 of 8 GPUs are idle during: optimizer"),
    "memory/gspo_published": ("memory/gspo_8gpu_published", "rl", "engine.enforce_eager=false"),
}
"""Recipe -> its published placement, its stage, and what its plan has to point out."""
BETTER = {
    "rlhf/ppo": ("rlhf/ppo_8gpu", "rl"),
    "rlhf/drca": ("rlhf/drca_8gpu", "rl"),
    "rlhf/sft": ("rlhf/sft_8gpu", "sft"),
    "rlhf/dpo": ("rlhf/dpo_8gpu", "dpo"),
    "rlhf/reward": ("rlhf/reward_8gpu", "reward"),
    "memory/gspo": ("memory/gspo_8gpu", "rl"),
}


def recipe_of(*names, stage="rl", overrides=()):
    return load_recipe([str(RECIPES / f"{name}.yaml") for name in names], list(overrides), stage)


def shown(recipe, width, lengths=(208, 127, 227, 0)):
    out = io.StringIO()
    episodes = rows = None
    if recipe.stage == "rl":
        episodes = Episodes(recipe.rollout.groups_per_step, recipe.rollout.episodes_per_group, *lengths)
    else:
        sides = 1 if recipe.stage == "sft" else 2
        rows = rows_of(sides * recipe.rows_per_update, sum(lengths[:2]), lengths[1])
    console = Console(file=out, width=width)
    show_placement(recipe, described(1, 8, H100), H100, QWEN3_4B, console, episodes, rows)
    return out.getvalue()


@pytest.mark.parametrize("base", PUBLISHED)
def test_published_placements_resolve_and_their_plans_show_idle_gpus(base):
    name, stage, said = PUBLISHED[base]
    recipe = recipe_of(base, name, stage=stage)
    told = " ".join(shown(recipe, 400, (1500, 1500, 3500, 600) if "memory" in base else (208, 127, 227, 0)).split())
    assert said in told
    assert "suggestions" in told
    assert "x as fast" in told


@pytest.mark.parametrize("base", BETTER)
def test_better_placements_leave_no_gpu_waiting(base):
    name, stage = BETTER[base]
    recipe = recipe_of(base, name, stage=stage)
    workers, share = place(recipe, described(1, 8, H100))
    assert share == 1
    assert {device for worker in workers for device in worker.devices} == set(range(8))
    phases = placed_phases(recipe, QWEN3_4B, H100, True)
    assert phases
    assert not idle_words(phases, workers, 8)


def test_dedicated_models_are_counted_on_their_own_gpus():
    memory = memory_of(recipe_of("rlhf/ppo", "rlhf/ppo_8gpu_published"), QWEN3_4B, True, H100)
    weights = 2 * QWEN3_4B.parameters
    assert memory["reference model"] == (weights, weights)
    assert weights < memory["critic"][0] < 80e9


@pytest.mark.parametrize("base", ["rlhf/ppo", "rlhf/drca"])
def test_the_better_placement_is_several_times_as_fast(base):
    job = Episodes(256, 2, 208, 127, 227)
    published, better = (recipe_of(base, found[base][0]) for found in (PUBLISHED, BETTER))
    seconds = [sum(phase.seconds for phase in placed_phases(r, QWEN3_4B, H100, True, job)) for r in (published, better)]
    assert 1.5 < seconds[0] / seconds[1] < 20


def test_the_advised_recipe_is_as_fast_as_predicted():
    recipe = recipe_of("rlhf/ppo", "rlhf/ppo_8gpu_published")
    nodes, job = described(1, 8, H100), Episodes(256, 2, 208, 127, 227)
    best = advised(recipe, QWEN3_4B, H100, nodes, job)[0]
    changed = recipe_of("rlhf/ppo", "rlhf/ppo_8gpu_published", overrides=best.words.split())
    place(changed, nodes)
    seconds = sum(phase.seconds for phase in placed_phases(changed, QWEN3_4B, H100, True, job))
    assert seconds == pytest.approx(best.seconds)


def test_unused_gpus_count_as_idle_and_the_advice_is_to_use_them():
    told = " ".join(shown(recipe_of("memory/gspo"), 400).split())
    assert "7 of 8 GPUs are unused; raise hardware.processes = 1" in told
    assert "GPUs are idle for 88% of a step: 1 of 8 are busy" in told
    assert "7 of 8 GPUs are idle during: sampling" in told
    advice = told.partition("suggestions ")[2]
    assert advice.startswith("hardware.ray=auto hardware.processes=8 ")
    words = advice.partition(" a step")[0].split()
    place(recipe_of("memory/gspo", overrides=[word for word in words if "=" in word]), described(1, 8, H100))


def test_asynchronous_engines_wait_only_for_the_slower_side():
    keys = ["ray=auto", "processes=4", "engines.count=4", "engines.colocated=false"]
    overrides = ["rollout.async_rollouts=1", *(f"hardware.{key}" for key in keys)]
    told = " ".join(shown(recipe_of("memory/gspo", overrides=overrides), 400).split())
    assert "during:" not in told
    assert re.search(r"4 of 8 GPUs \((learner|engine)\) are idle for \S+ s, \d+% of the step: \w+ takes longer", told)


@pytest.mark.parametrize("width", [80, 120])
def test_a_plan_fits_the_terminal(width):
    told = shown(recipe_of("rlhf/ppo", "rlhf/ppo_8gpu_published"), width)
    assert max(map(len, told.splitlines())) <= width
    assert "…" not in told
    assert "reference model 0" in told


def test_a_whole_run_fits_two_cores():
    recipe = load_recipe([], ["hardware.ray=auto", "hardware.environments.count=2"], "rl")
    workers, share = place(recipe, [Node("here", 2.0, 0)])
    assert [worker.name for worker in workers] == ["learner 0", "engine 0", "environments 0", "environments 1"]
    assert share == pytest.approx(2 / 3)
    assert sum(worker.cpus for worker in workers) <= 2
    memory = memory_of(recipe, QWEN3_4B, False)
    assert memory["engine"][0] > 4 * QWEN3_4B.parameters


def test_the_error_about_missing_gpus_names_keys():
    recipe = load_recipe([], ["hardware.ray=auto", "hardware.processes=9"], "rl")
    with pytest.raises(InputError, match=r"need 9 GPUs, but the cluster has 8; lower hardware\.processes"):
        place(recipe, described(1, 8, H100))


def test_an_engine_of_several_gpus_stays_on_one_machine():
    keys = ["hardware.ray=auto", "hardware.processes=4", "hardware.engines.devices=4"]
    with pytest.raises(InputError, match="all devices of an engine must be on one node"):
        place(load_recipe([], keys, "rl"), [Node("a", 24, 2), Node("b", 24, 2)])
    workers, _ = place(load_recipe([], keys, "rl"), [Node("a", 24, 4), Node("b", 24, 4)])
    engine = next(worker for worker in workers if worker.role == "engine")
    assert (engine.node, engine.devices) == (0, (0, 1, 2, 3))


def test_placement_without_ray_has_no_effect_and_is_refused():
    with pytest.raises(InputError, match=r"hardware\.engines"):
        load_recipe([], ["hardware.engines.count=2"], "rl")


def test_environments_share_the_spare_cores():
    recipe = load_recipe([], ["hardware.ray=auto"], "rl")
    for cores, expected in ((2, 1), (18, 4), (1000, 16)):
        roles = [worker.role for worker in workers_of(recipe, [Node("here", cores, 0)])]
        assert roles.count("environments") == expected


def test_living_nodes_are_read_from_ray():
    states = [
        {"Alive": True, "NodeManagerAddress": "b", "Resources": {"CPU": 4.0, "GPU": 2.0, "accelerator_type:H100": 1.0}},
        {"Alive": True, "NodeManagerAddress": "a", "Resources": {"CPU": 2.0, "node:__internal_head__": 1.0}},
        {"Alive": False, "NodeManagerAddress": "c", "Resources": {}},
    ]
    nodes, device = living(states)
    assert nodes == [Node("a", 2.0, 0), Node("b", 4.0, 2)]
    assert device is H100
