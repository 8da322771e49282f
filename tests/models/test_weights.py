"""Weights as they are sent to an engine: bit for bit those of an export."""

import pytest
import torch
from safetensors.torch import load_file

from posttrain.models.policy import Policy
from posttrain.recipe.model import LoraRecipe, ModelRecipe
from tests.conftest import save_tiny_model


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("lora", [None, LoraRecipe(rank=4)])
def test_weights_are_those_of_an_export(tmp_path, architecture, lora):
    policy = Policy(ModelRecipe(path=str(save_tiny_model(tmp_path / "model", architecture)), lora=lora))
    torch.manual_seed(1)
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter += 0.1 * torch.randn_like(parameter)
    policy.export(tmp_path / "exported")
    written = load_file(tmp_path / "exported" / "model.safetensors")
    sent = dict(policy.weights())
    assert sorted(sent) == sorted(written)
    assert [name for name in sent if not torch.equal(sent[name], written[name])] == []


def test_adapter_weights_are_those_that_peft_writes(tmp_path):
    lora = LoraRecipe(rank=4, export="adapter")
    policy = Policy(ModelRecipe(path=str(save_tiny_model(tmp_path / "model")), lora=lora))
    policy.export(tmp_path / "exported")
    written = load_file(tmp_path / "exported" / "adapter_model.safetensors")
    sent = dict(policy.adapter_weights())
    assert sorted(sent) == sorted(written)
    assert all(torch.equal(sent[name], written[name]) for name in sent)


@pytest.mark.parametrize(("device", "expected"), [("cpu", []), ("cuda", ["emptied"])])
def test_cached_memory_is_returned_on_a_gpu_alone(tiny_model, monkeypatch, device, expected):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    policy = Policy(str(tiny_model))
    monkeypatch.setattr(Policy, "device", torch.device(device))
    policy.release_cached_memory()
    assert calls == expected
