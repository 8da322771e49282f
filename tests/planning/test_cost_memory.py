"""Memory of placements and of teachers: to the byte for tiny shapes, and how it shrinks with devices. Parameters by hand."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.planning.dry_run import batch_arithmetic
from posttrain.planning.memory import ModelSizes, at_a_time, engine_memory, memory_estimate
from posttrain.planning.model_sizes import published_sizes
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.distill import DistillRecipe
from posttrain.recipe.plan import ALONE, DEVICES, Placement
from posttrain.recipe.rl import RlRecipe

SIZES = ModelSizes(1000, 2, 8, 16, 4, 2, 2, 100)
QWEN3_4B = ModelSizes(4_022_000_000, 36, 2560, 9728, 32, 8, 128, 151_936)
MIXTURE = ModelSizes(5000, 2, 8, 16, 4, 2, 2, 100, experts=4, experts_per_token=2)


@cache
def recipe_of(*overrides):
    chosen = ["engine.slots=3", "rollout.tokens_per_episode=100", "model.dtype=bfloat16", *overrides]
    return load_recipe([], ["rollout.tokens_per_turn=10", *chosen], "rl")


def sizes_of(rows):
    return {what: count for what, (count, _) in rows.items()}


def test_memory_that_sharding_divides_and_that_it_does_not():
    assert memory_estimate(recipe_of(), SIZES) == memory_estimate(recipe_of(), SIZES, ALONE)
    assert "weights of the engine" not in memory_estimate(recipe_of(), SIZES)
    recipe = recipe_of("kl.coefficient=0.1")
    whole, found = (sizes_of(memory_estimate(recipe, SIZES, placed)) for placed in (ALONE, Placement(3, 3)))
    assert found["weights"] == found["gradients"] == found["reference model"] == 667  # 2000 / 3, rounded up
    assert (found["float32 masters and their gradients"], found["AdamW state"]) == (2000, 2667)
    assert found["activations, roughly"] == whole["activations, roughly"]
    assert found["logits"] == whole["logits"]
    held = [found[what] for what in ("activations, roughly", "logits")]
    assert found["gathered temporarily"] == SIZES.gathered_bytes(2, held[0], *held, True, False, False)


def test_the_largest_moment_of_a_pass_decides():
    """Tied to the embedding, whose 800 weights are gathered, and a layer of 576."""
    head, layer = 800, SIZES.layer
    assert SIZES.gathered_bytes(2, 10**6, 10**6, 10**6, True, False, False) == 2 * (head + layer) + 2 * head
    assert SIZES.gathered_bytes(2, 0, 10**6, 0, True, False, False) == 2 * head + 4 * layer + 2 * head + 6 * layer
    assert SIZES.gathered_bytes(2, 0, 0, 0, True, False, False) == max(8 * head + 4 * layer, 4 * head + 10 * layer)
    untied = replace(SIZES, tied=False)
    assert untied.gathered_bytes(2, 0, 0, 0, False, False, False) == 2 * 2 * (2 * head + layer)
    whole = untied.gathered_bytes(2, 0, 10**6, 0, False, False, True)
    assert whole == 2 * (2 * head + 2 * layer)


def peaks(recipe, sizes, placed):
    """Bytes while learning and while sampling."""
    engine = engine_memory(recipe, sizes, placed)
    return [sum(at.values()) for at in at_a_time(recipe, memory_estimate(recipe, sizes, placed), engine, placed)]


def test_an_engine_in_a_separate_process():
    beside = Placement(4, 4, engines=2, tensor=2, colocated=False)
    rows = sizes_of(engine_memory(recipe_of(), SIZES, beside))
    cache = 2 * 2 * 1 * 2 * 2  # keys and values, layers, one of two heads, head size, bytes
    assert rows == {"weights of the engine": 1000, "key/value cache, at most": 3 * 100 * cache}
    assert not set(rows) & set(memory_estimate(recipe_of(), SIZES, beside))
    # A head is never cut: four devices hold one each, as two do.
    four = replace(beside, engines=1, tensor=4)
    assert sizes_of(engine_memory(recipe_of(), SIZES, four))["key/value cache, at most"] == 3 * 100 * cache


def test_a_colocated_engine_sleeps_while_the_learner_learns():
    placed = Placement(2, 2, engines=2)
    rows = sizes_of(memory_estimate(recipe_of(), SIZES, placed))
    engine = rows["weights of the engine"] + rows["key/value cache, at most"]
    passing = rows["activations, roughly"] + rows["logits"] + rows["gathered temporarily"] + rows["gradients"]
    passing += rows["float32 masters and their gradients"] * 2 // 3
    assert peaks(recipe_of(), SIZES, placed) == [sum(rows.values()) - engine, sum(rows.values()) - passing]


def test_what_rollouts_offload_of_sharded_state():
    """FSDP's shards are the masters, so they stay, and each device keeps its share of the reference model."""
    recipe = recipe_of("kl.coefficient=0.1", "hardware.offload=rollouts")
    alone, shared = Placement(), Placement(2, 2)
    rows = [memory_estimate(recipe, SIZES, placed) for placed in (alone, shared)]
    assert [sizes_of(row)["reference model"] for row in rows] == [0, 1000]
    sampling = [at_a_time(recipe, row, {}, placed)[1] for row, placed in zip(rows, (alone, shared), strict=True)]
    assert "AdamW state" not in sampling[0] | sampling[1]
    assert [held.get("float32 masters and their gradients") for held in sampling] == [None, 1000]


def test_vllm_takes_its_share_of_a_known_gpu_and_none_where_it_runs_elsewhere():
    def engine(*words, device=DEVICES["h100"]):
        recipe = load_recipe([], ["engine.type=vllm", "model.dtype=bfloat16", *words], "rl")
        return sizes_of(memory_estimate(recipe, SIZES, device=device))

    assert engine()["weights of the engine"] + engine()["key/value cache"] == 40e9
    assert engine("engine.gpu_memory_utilization=0.25")["key/value cache"] == 20e9 - 2000
    assert engine("engine.cache_gigabytes=2")["key/value cache"] == 2 * 2**30
    assert "key/value cache, at most" in engine(device=None)
    for elsewhere in ("engine.urls=[http://a:1]", "engine.first_device=1"):
        assert not {"weights of the engine", "key/value cache"} & set(engine(elsewhere)), elsewhere


def test_rollouts_ahead_in_one_process_are_beside_the_learner():
    recipe = recipe_of("rollout.async_rollouts=1")
    rows = memory_estimate(recipe, SIZES)
    learning, sampling = at_a_time(recipe, rows, engine_memory(recipe, SIZES), ALONE)
    assert learning == sampling == sizes_of(rows)


def test_a_reward_model_has_a_scalar_head_in_place_of_the_output_projection():
    untied = replace(SIZES, tied=False)
    rl = ["reward.path=rm", "reward.dtype=bfloat16", "credit.type=gae", "critic.dtype=bfloat16"]
    for recipe, what in (
        (load_recipe([], ["data.train=[rows.jsonl]", "model.dtype=bfloat16"], "reward"), "weights"),
        (load_recipe([], ["data.train=[rows.jsonl]", "model.dtype=bfloat16"], "reward"), "AdamW state"),
        (recipe_of(*rl), "reward model"),
        (recipe_of(*rl), "critic"),
    ):
        tied, found = (sizes_of(memory_estimate(recipe, sizes))[what] for sizes in (SIZES, untied))
        assert found / tied == (1000 - 8 * 100) / 1000, what
    assert memory_estimate(recipe_of(), SIZES) == memory_estimate(recipe_of(), untied)


def test_an_offloaded_optimizer():
    offload = "hardware.offload=optimizer"
    here, there = (sizes_of(memory_estimate(recipe_of(*keys), SIZES)) for keys in ((), (offload,)))
    gone = {"AdamW state": 8000, "float32 masters and their gradients": 6000}
    # Gradients are copied at the end of a pass. On the device, each is freed when it is complete: the largest has 800.
    assert (here.pop("gradients"), there.pop("gradients")) == (2 * 800, 2 * 1000)
    assert here == there | gone
    assert all(there[what] == 0 for what in gone)


def test_experts_take_memory_though_few_are_active():
    more = replace(MIXTURE, experts=8, parameters=MIXTURE.parameters + 2 * 4 * MIXTURE.expert)
    few, many = (sizes_of(memory_estimate(recipe_of(), sizes)) for sizes in (MIXTURE, more))
    assert many["weights"] - few["weights"] == 2 * 2 * 4 * 3 * 8 * 16
    assert many["activations, roughly"] == few["activations, roughly"]
    assert recipe_of("model.lora.rank=1").model.trained_parameters(MIXTURE) == 2 * (
        (16 + 12 + 12 + 16) + 4 * (2 * (8 + 2 * 16) + (16 + 8))
    )


def test_four_bit_matrices_are_an_eighth_of_float32():
    whole, packed = (
        memory_estimate(load_recipe([], ["environment.type=bandit", "model.lora.rank=4", *more], "rl"), QWEN3_4B)[
            "weights"
        ]
        for more in ((), ("model.load_in_4bit=true",))
    )
    matrices = QWEN3_4B.layers * QWEN3_4B.layer
    rest = QWEN3_4B.parameters - matrices
    assert whole[0] == 4 * QWEN3_4B.parameters
    assert packed[0] - 2 * rest == pytest.approx(matrices * (0.5 + 1 / 64 + 4 / (64 * 256)), abs=1)
    assert f"{matrices:,} parameters of 4 bits" in packed[1]


@settings(deadline=None)
@given(
    st.integers(0, 6),
    st.integers(0, 3),
    st.sampled_from(["false", "true", "selective"]),
    st.sampled_from([SIZES, MIXTURE, ModelSizes(4_000_000_000, 36, 2560, 9728, 32, 8, 128, 151_936)]),
)
def test_more_devices_never_take_more_memory_each(power, tensor, checkpointing, sizes):
    recipe = recipe_of(f"model.gradient_checkpointing={checkpointing}")
    fewer, more = 2 ** (power + 1), 2 ** (power + 2)
    before, after = (peaks(recipe, sizes, Placement(n, n, engines=n)) for n in (fewer, more))
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    placed = (Placement(16, 16, engines=1, tensor=t) for t in (2**tensor, 2 ** (tensor + 1)))
    narrow, wide = (sum(sizes_of(engine_memory(recipe, sizes, place)).values()) for place in placed)
    assert wide <= narrow


# -- distillation ----------------------------------------------------------------------------------------------------

SMOL = 134_515_008
TAUGHT = ModelSizes(1_000_000, 2, 64, 128, 4, 2, 16, 1000)


def distilling(teacher, **keys):
    return DistillRecipe.model_validate({"teacher": teacher, "learner": {"logits_per_chunk": 100}} | keys)


def taught(teacher, **keys):
    return memory_estimate(distilling(teacher, **keys), TAUGHT)


def test_memory_of_local_remote_and_shared_teachers():
    assert taught({"path": "packaged:smollm2-135m"})["teacher"][0] == 4 * SMOL
    assert taught({"path": "packaged:smollm2-135m", "dtype": "bfloat16"})["teacher"][0] == 2 * SMOL
    assert taught({"path": "runs/later/model"})["teacher"] == (4_000_000, "assuming the size of the policy")
    in_the_reward = RlRecipe.model_validate({"teacher": {"path": "packaged:smollm2-135m"}})
    assert memory_estimate(in_the_reward, TAUGHT)["teacher"][0] == 4 * SMOL
    assert taught({"urls": ["http://a/v1"]})["teacher"][0] == 0
    assert taught({"policy": "current", "context": "x"})["teacher"][0] == 0
    assert taught({"policy": "initial", "context": "x"})["teacher"][0] == 4_000_000
    assert taught({"policy": "initial", "context": "x"}, model={"lora": {}})["teacher"][0] == 0


def test_memory_of_distributions_by_candidates_or_vocabulary():
    rollout = {"groups_per_step": 2, "episodes_per_group": 3, "tokens_per_turn": 10}
    environment = {"type": "bandit"}
    tokens = 2 * 3 * 10 * distilling({"path": "a"}, environment=environment).environment.max_turns
    assert "teacher's distributions, at most" not in taught({"path": "a"})
    for top_k, size in ((50, 50 * 8), (None, 1000 * 4)):
        rows = taught({"path": "a"}, loss={"type": "jsd", "top_k": top_k}, rollout=rollout, environment=environment)
        assert rows["teacher's distributions, at most"][0] == tokens * size
        assert rows["logits"][0] == 24 * 100 * 1000


def test_the_arithmetic_names_the_teacher_and_the_fixed_rows():
    rows = {"data": {"train": "rows.jsonl"}, "share": 0.25}
    lines = batch_arithmetic(distilling({"path": "a"}, loss={"type": "jsd"}, off_policy=rows, steps=40))
    assert "teacher: a" in lines
    assert any("about 10 of 40 steps" in line for line in lines)


# -- parameters ------------------------------------------------------------------------------------------------------

# One layer: queries 3x4, keys and values 3x2 each, output 4x3, and three matrices 3x5.
BY_HAND = ModelSizes(0, 2, 3, 5, 2, 1, 2, 7)
LAYER = 3 * 4 + 3 * 2 + 3 * 2 + 4 * 3 + 3 * 3 * 5
OF_EXPERTS = replace(BY_HAND, experts=4, experts_per_token=2)
SHARED = 3 * 4 + 3 * 2 + 3 * 2 + 4 * 3 + 3 * 4
EXPERT = 3 * 3 * 5


def test_parameters_by_hand_of_a_dense_model_and_of_one_that_stores_all_experts():
    assert (BY_HAND.layer, BY_HAND.active_layer, BY_HAND.head) == (LAYER, LAYER, 21)
    assert BY_HAND.computed_parameters == 21 + 2 * (LAYER + 6) + 3
    assert replace(BY_HAND, tied=False).computed_parameters == BY_HAND.computed_parameters + 21
    assert (OF_EXPERTS.layer, OF_EXPERTS.active_layer) == (SHARED + 4 * EXPERT, SHARED + 2 * EXPERT)
    assert OF_EXPERTS.computed_parameters == 21 + 2 * (SHARED + 4 * EXPERT + 6) + 3


def test_the_sizes_of_published_models_add_up():
    """Parameters as their model cards state them: 4.0, 32.8 and 235 billion, 22 of which are active."""
    qwen4, qwen32, qwen235 = (published_sizes(f"Qwen3-{size}") for size in ("4B", "32B", "235B-A22B"))
    found = [sizes.computed_parameters / 1e9 for sizes in (qwen4, qwen32, qwen235)]
    assert found == pytest.approx([4.02, 32.8, 235.1], rel=2e-3)
    active = qwen235.layers * qwen235.active_layer + 2 * qwen235.head
    assert active / 1e9 == pytest.approx(22.2, rel=2e-3)
