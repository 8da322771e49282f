"""QLoRA: 4-bit matrices under adapters. bitsandbytes computes them on a CPU too, which recipes refuse because it is slow."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from posttrain.distributed import world
from posttrain.engines.local.decoder import ModuleDecoder, decoder_of
from posttrain.errors import InputError
from posttrain.models.cuda import four_bit
from posttrain.models.policy import Policy
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.model import ModelRecipe

bitsandbytes = pytest.importorskip(
    "bitsandbytes", reason="needs the package bitsandbytes: pip install 'posttrain[cuda]'"
)

LORA = {"rank": 4, "targets": ["q_proj", "down_proj"]}


def streams_of(seed):
    random = np.random.default_rng(seed)
    ids = [random.integers(3, 250, 12) for _ in range(2)]
    return ids, [np.arange(12) > 4 for _ in ids]


def recipe(path, **settings):
    return ModelRecipe(path=str(path), lora=LORA, load_in_4bit=True, dtype="bfloat16", **settings)


@pytest.fixture
def policy(tiny_model, monkeypatch):
    monkeypatch.setattr(four_bit, "require_gpu", lambda device: None)
    # On some CPUs it would pack the matrices for products of those CPUs, without gradients.
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    made = Policy(recipe(tiny_model), seed=3)
    for name, parameter in made.trainable():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return made


def test_a_cpu_several_processes_and_settings_that_do_not_fit_are_refused(tiny_model, monkeypatch):
    with pytest.raises(InputError, match=r"model\.load_in_4bit: 4-bit weights need a GPU; remove it"):
        Policy(recipe(tiny_model))
    for settings, reason in (({"lora": None}, "adapters must learn"), ({"dtype": "float32"}, "computes in bfloat16")):
        with pytest.raises(ValidationError, match=reason):
            ModelRecipe(**{"lora": LORA, "load_in_4bit": True} | settings)
    monkeypatch.setitem(world._state, "world", world.World(HardwareRecipe(offload="all")))
    with pytest.raises(InputError, match=r"model\.load_in_4bit is for one process"):
        Policy(recipe(tiny_model))


def test_adapters_alone_learn_and_the_matrices_have_four_bits(policy):
    layer = policy.model.get_base_model().model.layers[0]
    assert layer.self_attn.q_proj.base_layer.weight.dtype == layer.self_attn.k_proj.weight.dtype == torch.uint8
    assert policy.model.get_base_model().lm_head.weight.dtype == torch.bfloat16
    assert {p.dtype for _, p in policy.trainable()} == {torch.bfloat16}
    ids, sampled = streams_of(1)
    policy.score(ids, sampled, 1.0, 64).logprobs.sum().backward()
    assert all("lora" in name and p.grad is not None and p.grad.abs().sum() > 0 for name, p in policy.trainable())


def test_it_computes_with_the_weights_that_engines_get(policy, tiny_model):
    """A model of the sent weights gives the log-probabilities of the policy, up to the rounding of bfloat16."""
    ids, sampled = streams_of(2)
    expected = policy.score(ids, sampled, 1.0, 64).logprobs.detach()
    plain = Policy(ModelRecipe(path=str(tiny_model), dtype="bfloat16"))
    own = dict(plain.model.named_parameters())
    sent = dict(policy.weights())
    assert set(sent) == set(own)
    with torch.no_grad():
        for name, tensor in sent.items():
            assert tensor.shape == own[name].shape
            own[name].copy_(tensor)
    torch.testing.assert_close(plain.score(ids, sampled, 1.0, 64).logprobs, expected, atol=0.05, rtol=0.05)
    with policy.as_reference():
        reference = policy.score(ids, sampled, 1.0, 64).logprobs
    assert not torch.allclose(reference, expected)
    assert isinstance(decoder_of(policy.model), ModuleDecoder)


def test_checkpoints_and_exports_hold_the_adapters(policy, tiny_model, tmp_path, monkeypatch):
    policy.save(tmp_path / "adapters")
    again = Policy(recipe(tiny_model), seed=9)
    again.restore(tmp_path / "adapters")
    for (_, one), (_, other) in zip(policy.trainable(), again.trainable(), strict=True):
        assert torch.equal(one, other)
    policy.export(tmp_path / "merged")
    merged = Policy(ModelRecipe(path=str(tmp_path / "merged"), dtype="bfloat16"))
    whole = Policy(ModelRecipe(path=str(tiny_model), dtype="bfloat16"))
    name = "model.layers.0.self_attn.q_proj"
    adapted = policy.model.get_base_model().get_submodule(name)
    change = merged.model.get_submodule(name).weight - whole.model.get_submodule(name).weight
    torch.testing.assert_close(change.float(), adapted.get_delta_weight("default").float(), atol=2e-3, rtol=0.05)
    assert torch.equal(merged.model.model.embed_tokens.weight, whole.model.model.embed_tokens.weight)
