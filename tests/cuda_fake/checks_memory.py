"""Memory plans against what an update allocates on the fake device, for layers of published shapes."""

import contextlib
import gc
from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import AutoConfig

from posttrain.distributed import world
from posttrain.distributed.sharding import local_shard
from posttrain.engines.local.engine import LocalEngine
from posttrain.models.policy import Policy
from posttrain.planning.memory import at_a_time, at_peak, engine_memory, memory_rows
from posttrain.planning.model_sizes import PUBLISHED
from posttrain.planning.workers import placement_of
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.model import OptimizerRecipe
from posttrain.recipe.plan import ACTIVATIONS, DEVICES, ModelSizes, Plan
from posttrain.recipe.supervised import SftRecipe
from posttrain.training.objectives import SupervisedObjective, logprobs
from posttrain.training.optimizer import Optimizer
from posttrain.training.reference import move_towards
from tests.cuda_fake import made
from tests.cuda_fake.checks_engine import sampled
from tests.training import small

TOKENS = 2048


def policy_of(name, layers, path, vocabulary=1000, **settings):
    """A policy of the published shape `name` with so many layers (None: all) and words."""
    sizes = PUBLISHED[name]
    family = "qwen2" if name.startswith("Qwen2") else "llama" if name.startswith("Llama") else "qwen3"
    experts = {"num_experts": sizes.experts, "num_experts_per_tok": sizes.experts_per_token, "norm_topk_prob": True}
    config = AutoConfig.for_model(
        f"{family}_moe" if sizes.experts else family,
        **(experts | {"moe_intermediate_size": sizes.intermediate} if sizes.experts else {}),
        vocab_size=vocabulary or sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=layers or sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_value_heads,
        head_dim=sizes.head_size,
        max_position_embeddings=4096,
        tie_word_embeddings=sizes.tied,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )
    return made.ShapedPolicy(made.recipe(path, **settings), config)


def measured(device, path, name, tokens, lora=False, recomputed=False, layers=None):
    """Bytes on one of the processes: `state` before an update, `peak` of one with two passes of `tokens` tokens each, and
    `resting` after it, while episodes are sampled."""
    settings = {"gradient_checkpointing": recomputed, "lora": {"rank": 16} if lora else None}
    gc.collect()
    before = device.live
    policy = policy_of(name, layers, path, None, **settings)
    optimizer = Optimizer(policy.trainable(), OptimizerRecipe(), 1)
    gc.collect()
    device.reset()
    state = device.live - before
    for number in range(2):
        row = made.stream(number, tokens)
        with policy.training_mode("row"):
            scores = policy.score([row.ids], [row.sampled], 1.0, 512)
            policy.set_last_backward(number == 1)
            scores.logprobs.sum().backward()
        del scores
        optimizer.collect()
    optimizer.step()
    gc.collect()
    return {"state": state, "peak": device.peak - before, "resting": device.live - before}


def planned(name, tokens, lora=False, recomputed=False, layers=None, processes=8, kind="adamw"):
    """The items of the plan for such an update."""
    sizes = PUBLISHED[name]
    if layers is not None:
        sizes = replace(sizes, layers=layers)
        sizes = replace(sizes, parameters=sizes.computed_parameters)
    words = ["data.train=x.jsonl", f"data.max_tokens={tokens}", f"learner.tokens_per_batch={tokens}"]
    words += [f"hardware.processes={processes}", "hardware.gradient_sync=per_forward", "model.dtype=bfloat16"]
    words += [f"model.path=Qwen/{name}", f"model.gradient_checkpointing={recomputed}", f"optimizer.type={kind}"]
    words += ["model.lora.rank=16"] if lora else []
    return at_peak(load_recipe([], words, "sft"), sizes, DEVICES["h100"])[0]


def held_by_a_pass(device, policy):
    """Bytes that a forward pass with gradients keeps for its backward pass."""
    stream = made.stream(0, TOKENS)
    gc.collect()  # earlier policies
    before = device.live
    with policy.training_mode("memory"):
        scores = policy.score([stream.ids], [stream.sampled], 1.0, 512)
        held = device.live - before
        policy.set_last_backward(True)
        scores.logprobs.sum().backward()
    return held


DENSE = [("Qwen2.5-0.5B", None), ("Qwen3-4B", None), ("Llama-3-8B", {"rank": 16})]


# Selective checkpointing keeps nothing of transformers' products of experts.
LAYERS = [*((*dense, selective) for dense in DENSE for selective in (False, True)), ("Qwen3-235B-A22B", None, False)]


@pytest.mark.parametrize("case", small.cases(LAYERS, LAYERS[:1] + LAYERS[3:4] + LAYERS[5:]), ids=str)
def test_activations_of_a_layer(device, thin_model, case):
    shape, lora, selective = case
    settings = {"lora": lora} | ({"gradient_checkpointing": "selective"} if selective else {})
    held = [held_by_a_pass(device, policy_of(shape, layers, thin_model, **settings)) for layers in (1, 2)]
    counted = (held[1] - held[0]) / TOKENS
    sizes = PUBLISHED[shape]
    assert counted == pytest.approx(2 * (sizes.kept_products if selective else sizes.kept_activations), rel=0.05)


def test_gradients_in_bfloat16_are_not_all_held(device, thin_model, monkeypatch):
    def most_held():
        policy = policy_of("Qwen3-4B", 4, thin_model)
        learner = made.policy_updater(policy, made.LENGTH)
        gc.collect()
        before = device.live
        device.reset()
        # Two passes: those of the second have gradients beside the float32 ones of the first.
        made.updated(learner, [made.samples(1)[0], made.samples(3)[2]], SupervisedObjective())
        return device.peak - before, sum(2 * p.numel() for p in learner.optimizer.parameters)

    freed, gradients = most_held()

    @contextlib.contextmanager
    def at_the_end(optimizer):
        yield
        optimizer.collect()

    monkeypatch.setattr(Optimizer, "collecting", at_the_end)
    piled, _ = most_held()
    assert piled - freed > 0.8 * gradients


FEW_LAYERS = list(product(("Qwen3-4B", "Qwen3-8B", "Qwen3-30B-A3B"), (False, True), (False, True)))
QUICK = [("Qwen3-4B", True, False), ("Qwen3-30B-A3B", False, True)]
"""Dense and with experts; with and without adapters and checkpointing."""


@pytest.mark.parametrize("case", small.cases(FEW_LAYERS, QUICK), ids=str)
def test_the_plan_of_a_few_layers_is_within_a_tenth_of_the_peak(device, thin_model, case):
    name, lora, recomputed = case
    layers = 4 if "A3B" in name else 2  # two layers of experts are gathered at a time
    with made.processes(device, 8, 1):
        peak = measured(device, thin_model, name, 4096, lora, recomputed, layers=layers)["peak"]
    items = planned(name, 4096, lora, recomputed, layers=layers)
    assert sum(items.values()) == pytest.approx(peak, rel=0.1), {what: n / 2**20 for what, n in items.items()}


REPLICAS = [([2, 4], False), ([4, 2], True), ([2, 4], True), ([4, 2], False)]


@pytest.mark.parametrize("case", small.cases(REPLICAS, REPLICAS[:2]), ids=str)
def test_the_plan_of_replicas_is_within_a_tenth_of_the_peak(device, thin_model, case):
    processes, lora = case
    with made.processes(device, processes, 1):
        peak = measured(device, thin_model, "Qwen3-4B", 4096, lora, True, layers=2)["peak"]
    items = planned("Qwen3-4B", 4096, lora, True, layers=2, processes=processes)
    assert sum(items.values()) == pytest.approx(peak, rel=0.1), {what: n / 2**20 for what, n in items.items()}


def offloaded(device, thin_model, monkeypatch, offload):
    """(policy, learner, bytes before, bytes of the weights) after an update."""
    monkeypatch.setitem(world._state, "world", world.World(HardwareRecipe(offload=offload)))
    gc.collect()
    before = device.live
    policy = Policy(made.recipe(thin_model))
    learner = made.policy_updater(policy)
    made.updated(learner, made.samples(2), SupervisedObjective())
    return policy, learner, before, sum(p.numel() * p.element_size() for p in policy.model.parameters())


def test_an_offloaded_optimizer_leaves_weights_alone_on_the_device(device, thin_model, monkeypatch):
    policy, learner, before, weights = offloaded(device, thin_model, monkeypatch, "optimizer")
    state = [*learner.optimizer.weights().values(), *learner.optimizer.tensors().values()]
    assert {tensor.device.type for tensor in state} == {"cpu"}
    with policy.as_reference():
        gc.collect()
        inside = device.live - before
        assert policy.device.type == "cuda"
        assert len(logprobs(learner, made.samples(2))) == 2
    gc.collect()
    held = device.live - before
    assert weights <= held < 1.2 * weights
    reference = policy.reference_parameters().values()
    assert {p.device.type for p in reference} == {"cpu"}
    assert inside - held >= sum(p.numel() * p.element_size() for p in reference)


def test_shards_of_moments_in_cpu_memory_are_those_of_a_checkpoint(device, thin_model):
    with made.processes(device, 2, 1), pytest.MonkeyPatch.context() as patch:
        hardware = HardwareRecipe(processes=2, offload="optimizer")
        patch.setitem(world._state, "world", world.World(hardware, 0, 2))
        optimizer = made.policy_updater(policy_of("Qwen3-4B", 1, thin_model)).optimizer
        tensors = optimizer.tensors()
        for each in optimizer.trained:
            moment = local_shard(tensors[f"{each.name}/exp_avg"])
            assert moment.device.type == "cpu"
            assert moment.data_ptr() == each.moments["exp_avg"].data_ptr()


def test_a_sleeping_optimizer_leaves_weights_alone_on_the_device(device, thin_model, monkeypatch):
    policy, learner, before, weights = offloaded(device, thin_model, monkeypatch, "rollouts")
    assert policy.device.type == "cuda"
    held = device.live - before
    learner.optimizer.sleep()
    assert weights <= device.live - before < 1.2 * weights
    learner.optimizer.wake()
    assert device.live - before == held
    moments = learner.optimizer.moments()
    assert {tensor.device.type for name, tensor in moments.items() if not name.endswith("/step")} == {"cuda"}
    made.updated(learner, made.samples(2), SupervisedObjective())


@pytest.mark.parametrize("mix", [1.0, 0.5])
def test_a_reference_in_cpu_memory_follows_weights_on_the_device(device, mix):
    averages = [torch.zeros(3)]
    move_towards(averages, [torch.ones(3, device="cuda")], mix)
    assert averages[0].device.type == "cpu"


def test_activations_of_a_layer_of_a_divided_row(device, thin_model):
    """As `test_activations_of_a_layer`, for the share of one of four processes."""
    with made.processes(device, 4, 4):
        held = [held_by_a_pass(device, policy_of("Qwen3-4B", layers, thin_model)) for layers in (1, 2)]
    counted = (held[1] - held[0]) / (TOKENS / 4)
    sizes = ModelSizes(1, 2, 2560, 9728, 32, 8, 128, 1000, head_norms=True)
    settings = {"data": {"train": "x.jsonl"}, "model": {"dtype": "bfloat16"}, "learner": {"tokens_per_batch": TOKENS}}
    hardware = {"processes": 4, "sequence_parallel": 4}
    items = SftRecipe.model_validate(settings | {"hardware": hardware}).pass_items(Plan(sizes))
    assert counted * TOKENS / 4 == pytest.approx(items[ACTIVATIONS][0] / 2, rel=0.01)


def test_the_plan_of_an_engine_beside_the_learner_is_within_a_tenth_of_the_peak(device, thin_model):
    """The engine of the learner's process, whose weights are gathered and whose cache is full, beside the resting learner."""
    slots, tokens, layers = 16, 1024, 4
    with made.processes(device, 8, 1):
        gc.collect()
        before = device.live
        policy = policy_of("Qwen3-4B", layers, thin_model, None, gradient_checkpointing=True)
        learner = made.policy_updater(policy)
        made.updated(learner, made.samples(2), SupervisedObjective())
        engine = LocalEngine(policy, slots=slots)
        engine.load_weights(1)
        gc.collect()
        device.reset()
        assert len(sampled(engine, 4, slots, tokens - 4)) == slots
        peak = device.peak - before
    words = ["environment.type=bandit", "model.dtype=bfloat16", "model.path=Qwen/Qwen3-4B", "hardware.processes=8"]
    words += [f"engine.slots={slots}", f"rollout.tokens_per_episode={tokens}", "hardware.gradient_sync=per_forward"]
    recipe, sizes = load_recipe([], words, "rl"), replace(PUBLISHED["Qwen3-4B"], layers=layers)
    sizes = replace(sizes, parameters=sizes.computed_parameters)
    rows, placement = memory_rows(recipe, sizes, DEVICES["h100"]), placement_of(recipe)
    engine_rows = engine_memory(recipe, sizes, placement, DEVICES["h100"])
    _, items = at_a_time(recipe, rows, engine_rows, placement)
    assert sum(items.values()) == pytest.approx(peak, rel=0.1), {what: n / 2**20 for what, n in items.items()}


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_the_plan_of_a_whole_model_is_within_a_tenth_of_the_peak(device, thin_model, kind):
    """One process: gradients go to float32 in the backward pass, and masters are weights and 16 bits. The state is exact: a
    float32 master beside each weight would take 2 bytes more."""
    gc.collect()
    before = device.live
    policy = policy_of("Qwen3-4B", 2, thin_model, None, gradient_checkpointing=True)
    optimizer = Optimizer(policy.trainable(), OptimizerRecipe(type=kind), 1)
    count = sum(parameter.numel() for parameter in policy.model.parameters())
    each = 2 + 2 + (8 if kind == "adamw" else 2 + 8 / 256)
    assert device.live - before == pytest.approx(each * count, rel=1e-3)
    device.reset()
    for number in range(2):
        row = made.stream(number, 4096)
        with policy.training_mode("row"), optimizer.collecting():
            policy.score([row.ids], [row.sampled], 1.0, 512).logprobs.sum().backward()
    passing = device.peak - before
    optimizer.step()
    items = planned("Qwen3-4B", 4096, recomputed=True, layers=2, processes=1, kind=kind)
    assert device.peak - before == passing  # the step has no temporary copies
    assert sum(items.values()) == pytest.approx(passing, rel=0.1), {what: n / 2**20 for what, n in items.items()}
    # Clipping, AdamW and the bfloat16 weights are one launch for each parameter.
    assert device.kernels["adamw"] == len(optimizer.trained)
    assert not {name for name in device.kernels if "foreach" in name or "fused_adam" in name} - {"_foreach_norm"}
