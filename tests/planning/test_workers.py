"""Placement on described clusters, and the placements on 8 GPUs that ship as recipes."""

from io import StringIO

import pytest
from rich.console import Console

from posttrain.errors import InputError
from posttrain.planning.dry_run import show_plan
from posttrain.planning.memory import dedicated_memory, engine_memory, memory_estimate, process_memory, with_dtypes
from posttrain.planning.model_sizes import published_sizes
from posttrain.planning.workers import Node, living, place, placement_of, workers_of
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.plan import DEVICES, device_of

H100 = DEVICES["h100"]
QWEN3_4B = published_sizes("Qwen3-4B")
EIGHT_GPUS = [Node("node", 96.0, 8)]
PLACED = {
    **{
        f"rlhf/{name}_8gpu{end}": f"rlhf/{name}" for name in ("ppo", "drca", "sft", "dpo") for end in ("", "_published")
    },
    "rlhf/reward_8gpu": "rlhf/reward",
    "memory/gspo_8gpu_published": "memory/gspo_published",
    "memory/gspo_8gpu": "memory/gspo",
}
"""Placement -> its recipe."""


def recipe_of(*names, stage="rl", overrides=()):
    return load_recipe(list(names), list(overrides), stage)


def plan(recipe, device=H100):
    out = StringIO()
    show_plan(recipe, QWEN3_4B, Console(file=out, width=400), device, full=False)
    return out.getvalue()


@pytest.mark.parametrize("name", PLACED)
def test_placements_that_ship_fit_eight_gpus(name):
    base = PLACED[name]
    recipe = recipe_of(
        base, name, stage={"sft": "sft", "dpo": "dpo", "reward": "reward"}.get(base.rpartition("/")[2], "rl")
    )
    workers, share = place(recipe, EIGHT_GPUS)
    assert share == 1
    assert {device for worker in workers for device in worker.devices} == set(range(8))
    assert "the run needs an estimated" not in plan(recipe)
    assert "the run needs an estimated" in plan(recipe, device_of("8"))


def test_dedicated_models_are_counted_on_their_own_gpus():
    recipe = recipe_of("rlhf/ppo", "rlhf/ppo_8gpu_published")
    halves = with_dtypes(recipe, H100)
    memory = dedicated_memory(halves, QWEN3_4B, H100)
    weights = 2 * QWEN3_4B.parameters
    assert memory["reference model"] == memory["reward model"] == weights
    assert weights < memory["critic"] < 80e9
    assert memory["engine"] == 0.75 * 80e9
    shown = plan(recipe)
    assert "engine 55.88 GiB, reward model 7.49 GiB, critic 12.73 GiB, reference model 7.49 GiB" in shown
    assert "about 37.59 GiB per process" in shown  # none of these is on the learners' GPUs
    assert "the run needs an estimated" in plan(recipe, device_of("11"))


@pytest.mark.parametrize("engines", [{"devices": 2}, {"count": 3}, {"count": 2, "devices": 4}])
def test_a_plan_of_engines_that_a_cluster_refuses_is_shown(engines):
    keys = [f"hardware.engines.{key}={value}" for key, value in engines.items()]
    assert "about" in plan(load_recipe([], ["hardware.ray=auto", *keys], "rl"))


def test_an_engine_on_the_learners_gpu_has_its_own_weights():
    keys = ["model.dtype=bfloat16", "engine.slots=2"]
    ray = load_recipe([], [*keys, "hardware.ray=auto"], "rl")
    here = load_recipe([], keys, "rl")
    more = set(memory_estimate(ray, QWEN3_4B, placement_of(ray))) - set(memory_estimate(here, QWEN3_4B))
    assert more == {"weights of the engine"}
    two = load_recipe([], [*keys, "hardware.ray=auto", "hardware.processes=2"], "rl")
    rows = process_memory(two, QWEN3_4B)
    assert rows["weights of the engine"][0] == 2 * QWEN3_4B.parameters
    assert not [what for what in rows if what.startswith("unsharded")]
    apart = load_recipe([], [*keys, "hardware.ray=auto", "hardware.engines.colocated=false"], "rl")
    engine = engine_memory(apart, QWEN3_4B, placement_of(apart))
    assert dedicated_memory(apart, QWEN3_4B) == {"engine": sum(count for count, _ in engine.values())}
    assert not set(engine) & set(memory_estimate(apart, QWEN3_4B, placement_of(apart)))


def test_a_whole_run_fits_two_cores():
    recipe = load_recipe([], ["hardware.ray=auto", "hardware.environments.count=2"], "rl")
    workers, share = place(recipe, [Node("here", 2.0, 0)])
    assert [worker.name for worker in workers] == ["learner 0", "engine 0", "environments 0", "environments 1"]
    assert share == pytest.approx(2 / 3)
    assert sum(worker.cpus for worker in workers) <= 2


def test_an_engine_of_several_gpus_stays_on_one_machine():
    keys = ["hardware.ray=auto", "hardware.processes=4", "hardware.engines.devices=4"]
    with pytest.raises(InputError, match="all devices of an engine must be on one node"):
        place(load_recipe([], keys, "rl"), [Node("a", 24, 2), Node("b", 24, 2)])
    workers, _ = place(load_recipe([], keys, "rl"), [Node("a", 24, 4), Node("b", 24, 4)])
    engine = next(worker for worker in workers if worker.role == "engine")
    assert (engine.node, engine.devices) == (0, (0, 1, 2, 3))


def test_placement_without_ray_or_without_enough_gpus_is_refused():
    with pytest.raises(InputError, match=r"hardware\.engines"):
        load_recipe([], ["hardware.engines.count=2"], "rl")
    recipe = load_recipe([], ["hardware.ray=auto", "hardware.processes=9"], "rl")
    with pytest.raises(InputError, match=r"need 9 GPUs, but the cluster has 8; lower hardware\.processes"):
        place(recipe, EIGHT_GPUS)


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
    assert living(states) == [Node("a", 2.0, 0), Node("b", 4.0, 2)]
