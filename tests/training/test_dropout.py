"""Adapter dropout, gradient checkpointing and random states: every mask is a function of named counters."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, OPTConfig

from posttrain.distributed.world import World
from posttrain.losses.surrogates import PpoLoss
from posttrain.models.policy import Policy
from posttrain.models.reward import RewardModel
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.loss import EntropyRecipe
from posttrain.recipe.model import LearnerRecipe, OptimizerRecipe
from posttrain.training.objectives import PolicyObjective, token_forward
from posttrain.training.optimizer import Optimizer
from posttrain.training.trainer import random_states, set_random_states
from posttrain.training.updater import Updater
from tests.conftest import make_tokenizer
from tests.training import small

from .preferences import recipe_values, unpaired_rows, write_jsonl
from .small import recipe_values as rl_values
from .test_updater import samples

DROPOUT = {"rank": 4, "dropout": 0.5}
SIZES = {"vocab_size": 512, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}


def updater(model, budget=4096, learning_rate=1e-2, **settings):
    policy = Policy(str(model), **settings)
    optimizer = Optimizer(policy.trainable(), OptimizerRecipe(learning_rate=learning_rate, max_gradient_norm=1e9), 10)
    batches = LearnerRecipe(tokens_per_batch=budget)
    return Updater(policy, optimizer, batches, token_forward(policy, batches))


def gradients(model, monkeypatch, updates=0, rank=0, **settings):
    """Gradients of an update after `updates` others, in two or more micro-batches."""
    subject = updater(model, budget=150, **settings)
    with torch.no_grad():  # the second matrix of an adapter is zero at first
        for number, (_, parameter) in enumerate(subject.model.trainable()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) / 4)
    subject.optimizer.updates = updates
    found = small.kept_gradients(monkeypatch)
    subject.update(samples(), PolicyObjective(PpoLoss(), entropy=EntropyRecipe(coefficient=0.1)))
    return torch.cat([tensor.flatten() for tensor in found.values()])


def test_checkpointing_recomputes_the_same_masks(tiny_model, monkeypatch):
    kept = gradients(tiny_model, monkeypatch, lora=DROPOUT)
    torch.manual_seed(99)  # what was drawn before does not matter
    recomputed = gradients(tiny_model, monkeypatch, lora=DROPOUT, gradient_checkpointing=True)
    torch.testing.assert_close(recomputed, kept, atol=1e-7, rtol=1e-5)
    for other in (
        gradients(tiny_model, monkeypatch, lora={"rank": 4}),
        gradients(tiny_model, monkeypatch, lora=DROPOUT, updates=1),
        gradients(tiny_model, monkeypatch, lora=DROPOUT, seed=1),
    ):
        assert (other - kept).norm() > 0.1 * kept.norm()


def test_masks_differ_between_micro_batches_and_processes(tiny_model):
    policy = Policy(str(tiny_model), lora=DROPOUT)
    drop = next(module for name, module in policy.model.named_modules() if name.endswith("lora_dropout.default"))

    def mask(*draw):
        with policy.training_mode(*draw):
            return drop(torch.ones(64)) > 0

    subject = updater(tiny_model, lora=DROPOUT)
    names = {subject._draw(number) for number in (0, 1)}
    subject._world = World(HardwareRecipe(processes=2), 1, 2)
    names |= {subject._draw(number) for number in (0, 1)}
    assert len(names) == 3  # the second micro-batch has the same masks whether rank 0 or rank 1 computes it
    subject._world = World(HardwareRecipe(processes=2, sequence_parallel=2), 1, 2)
    names |= {subject._draw(0)}  # the second part of the first micro-batch
    assert len(names) == len({tuple(mask(*name).tolist()) for name in names}) == 4
    assert torch.equal(mask("optimizer", 3, 1), mask("optimizer", 3, 1))
    assert drop(torch.ones(64)).equal(torch.ones(64))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(attention_dropout=0.5, intermediate_size=48, **SIZES),
        GPTNeoXConfig(attention_dropout=0.5, hidden_dropout=0.5, intermediate_size=48, **SIZES),
        OPTConfig(dropout=0.5, attention_dropout=0.5, layerdrop=0.5, ffn_dim=48, word_embed_proj_dim=32, **SIZES),
    ],
    ids=lambda config: config.model_type,
)
def test_the_dropout_of_a_configuration_is_never_applied(config, checkpointing, tmp_path):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    policy = Policy(str(tmp_path), gradient_checkpointing=checkpointing)
    forward, batch = token_forward(policy, LearnerRecipe()), samples()[:2]
    with torch.no_grad():
        expected = forward(batch).logprobs
    with policy.training_mode():
        scores = forward(batch).logprobs
        scores.sum().backward()
    torch.testing.assert_close(scores, expected)
    with torch.no_grad():
        torch.testing.assert_close(forward(batch).logprobs, expected)


def run(values, folder):
    """The adapters after one step."""
    values |= {"runs": str(folder), "steps": 1, "seed": 3}
    small.train(values)
    return load_file(folder / "small" / "checkpoints" / "step_000001" / "policy" / "adapter_model.safetensors")


def values_of(stage, tiny, folder):
    """A small run of the stage."""
    if stage == "kto":
        rows = {name: write_jsonl(folder / f"{name}.jsonl", unpaired_rows(8)) for name in ("train", "validation")}
        return recipe_values("dpo", tiny, folder, loss={"type": "kto"}) | {"data": rows | {"max_tokens": 200}}
    if stage == "ppo":
        critic = {"lora": DROPOUT, "optimizer": {"learning_rate": 1e-3}}
        return rl_values(tiny, folder, credit={"type": "gae"}, kl={}, critic=critic)
    return rl_values(tiny, folder) if stage == "rl" else recipe_values(stage, tiny, folder)


@pytest.mark.parametrize("stage", small.cases(["sft", "dpo", "kto", "reward", "rl", "ppo"], ["sft"]))
def test_every_stage_trains_with_both(stage, tiny_model, tmp_path):
    made = {}
    for checkpointing in (False, True):
        folder = tmp_path / str(checkpointing)
        folder.mkdir()
        values = values_of(stage, tiny_model, folder)
        values["evaluation"]["every"] = 0
        values["model"] |= {"lora": DROPOUT, "gradient_checkpointing": checkpointing}
        made[checkpointing] = run(values, folder)
    torch.testing.assert_close(made[True], made[False], atol=1e-5, rtol=0)
    assert max(float(tensor.abs().max()) for name, tensor in made[True].items() if "lora_B" in name) > 1e-4


def test_a_skipped_update_names_the_episodes_of_both_models(tiny_model):
    subject = updater(tiny_model, lora=DROPOUT, gradient_checkpointing=True)
    chosen = samples()
    chosen[2].advantages[:] = float("nan")
    subject.update(chosen, PolicyObjective(PpoLoss(), entropy=EntropyRecipe(coefficient=0.0)))
    assert subject.take_warnings() == [f"update skipped: loss or gradient is not finite for {chosen[2].label}"]
    model = RewardModel(str(tiny_model), lora=DROPOUT, gradient_checkpointing=True)
    with model.training_mode("x"):
        model.rewards([s.stream.ids for s in chosen], [s.stream.sampled for s in chosen]).sum().backward()


def test_the_random_state_of_every_device_is_kept(monkeypatch):
    devices = SimpleNamespace(states=[torch.tensor([1, 2]), torch.tensor([3, 4])], device_count=lambda: 2)
    devices.get_rng_state = lambda device: devices.states[device]
    devices.set_rng_state = lambda state, device: devices.states.__setitem__(device.index, state)
    monkeypatch.setattr(torch, "get_device_module", lambda device: devices)
    states = random_states(torch.device("cuda"))
    assert list(states) == ["cpu", "cuda:0", "cuda:1"]
    drawn = torch.rand(3)
    devices.states = [torch.zeros(2), torch.zeros(2)]
    set_random_states(states)
    assert torch.equal(torch.rand(3), drawn)
    assert [state.tolist() for state in devices.states] == [[1, 2], [3, 4]]
