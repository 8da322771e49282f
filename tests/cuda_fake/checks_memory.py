"""Memory plans against what an update allocates on the fake device, for layers of published shapes."""

import contextlib
import gc

import pytest
import torch
from transformers import AutoConfig

from posttrain.distributed import world
from posttrain.models.policy import Policy
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.plan import ACTIVATIONS, ModelSizes, Plan
from posttrain.recipe.supervised import SftRecipe
from posttrain.training.objectives import SupervisedObjective, logprobs
from posttrain.training.optimizer import Optimizer
from posttrain.training.reference import move_towards
from tests.cuda_fake import made

TOKENS = 2048
SHAPES = {
    "Qwen2.5-0.5B": ("qwen2", 896, 4864, 14, 2, 64),
    "Qwen3-4B": ("qwen3", 2560, 9728, 32, 8, 128),
    "Llama-3-8B": ("llama", 4096, 14336, 32, 8, 128),
}


def policy_of(shape, layers, path, vocabulary=1000, **settings):
    family, hidden, intermediate, heads, key_heads, size = SHAPES[shape]
    config = AutoConfig.for_model(
        family,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=size,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return made.ShapedPolicy(made.recipe(path, **settings), config)


def held_by_a_pass(device, policy):
    """Bytes that a forward pass with gradients keeps for its backward pass."""
    stream = made.stream(0, TOKENS)
    before = device.live
    with policy.training_mode("memory"):
        scores = policy.score([stream.ids], [stream.sampled], 1.0, 512)
        held = device.live - before
        policy.set_last_backward(True)
        scores.logprobs.sum().backward()
    return held


@pytest.mark.parametrize("selective", [False, True], ids=["all", "selective"])
@pytest.mark.parametrize(
    ("shape", "lora"),
    [("Qwen2.5-0.5B", None), ("Qwen3-4B", None), ("Llama-3-8B", {"rank": 16})],
    ids=["qwen2", "qwen3", "llama with adapters"],
)
def test_activations_of_a_layer(device, thin_model, shape, lora, selective):
    settings = {"lora": lora} | ({"gradient_checkpointing": "selective"} if selective else {})
    held = [held_by_a_pass(device, policy_of(shape, layers, thin_model, **settings)) for layers in (1, 2)]
    counted = (held[1] - held[0]) / TOKENS
    family, *numbers = SHAPES[shape]
    hidden, intermediate, heads, key_heads, size = numbers
    sizes = ModelSizes(1, 2, hidden, intermediate, heads, key_heads, size, 1000, head_norms=family == "qwen3")
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


def test_an_offloaded_optimizer_leaves_weights_alone_on_the_device(device, thin_model, monkeypatch):
    monkeypatch.setitem(world._state, "world", world.World(HardwareRecipe(offload="optimizer")))
    gc.collect()
    before = device.live
    policy = Policy(made.recipe(thin_model))
    weights = sum(p.numel() * p.element_size() for p in policy.model.parameters())
    learner = made.policy_updater(policy)
    made.updated(learner, made.samples(2), SupervisedObjective())
    state = [*learner.optimizer.masters, *learner.optimizer.tensors().values()]
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


def test_a_sleeping_optimizer_leaves_weights_alone_on_the_device(device, thin_model, monkeypatch):
    monkeypatch.setitem(world._state, "world", world.World(HardwareRecipe(offload="rollouts")))
    gc.collect()
    before = device.live
    policy = Policy(made.recipe(thin_model))
    weights = sum(p.numel() * p.element_size() for p in policy.model.parameters())
    learner = made.policy_updater(policy)
    made.updated(learner, made.samples(2), SupervisedObjective())
    held = device.live - before
    learner.optimizer.sleep()
    assert weights <= device.live - before < 1.2 * weights
    learner.optimizer.wake()
    assert device.live - before == held
    assert {tensor.device.type for tensor in learner.optimizer.tensors().values()} == {"cuda"}
    made.updated(learner, made.samples(2), SupervisedObjective())


@pytest.mark.parametrize("mix", [1.0, 0.5])
def test_a_reference_in_cpu_memory_follows_weights_on_the_device(device, mix):
    averages = [torch.zeros(3)]
    move_towards(averages, [torch.ones(3, device="cuda")], mix)
    assert averages[0].device.type == "cpu"


def test_activations_of_a_layer_of_a_divided_row(device, thin_model):
    """As `test_activations_of_a_layer`, for the share of one of four processes."""
    held = []
    with made.processes(device, 4, 4):
        for layers in (1, 2):
            held.append(held_by_a_pass(device, policy_of("Qwen3-4B", layers, thin_model)))
    counted = (held[1] - held[0]) / (TOKENS / 4)
    sizes = ModelSizes(1, 2, 2560, 9728, 32, 8, 128, 1000, head_norms=True)
    settings = {"data": {"train": "x.jsonl"}, "model": {"dtype": "bfloat16"}, "learner": {"tokens_per_batch": TOKENS}}
    hardware = {"processes": 4, "sequence_parallel": 4}
    items = SftRecipe.model_validate(settings | {"hardware": hardware}).pass_items(Plan(sizes))
    assert counted * TOKENS / 4 == pytest.approx(items[ACTIVATIONS][0] / 2, rel=0.01)
