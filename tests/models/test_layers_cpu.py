"""Fused layers equal those of transformers, in values, gradients, names and weights."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from posttrain.models import layers
from posttrain.models.cpu import backend
from posttrain.models.forward import hidden_states
from posttrain.models.layers import use_fused_layers, use_packed_attention
from tests.conftest import tiny_config
from tests.models.bundles import bundle_layout


def config_of(architecture):
    if architecture != "mistral":
        return tiny_config(architecture, 100)
    return MistralConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=4,
    )  # fmt: skip


def both(config, dtype=torch.float32):
    """The same model in packed attention, with its own layers and with fused ones."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    use_packed_attention(plain)
    fused = copy.deepcopy(plain)
    use_fused_layers(fused)
    return plain, fused


def outputs(model, count=23):
    layout = bundle_layout([(9, [3, 4]), (count - 16, [])])
    ids = torch.randint(0, 100, (count,), generator=torch.Generator().manual_seed(1))
    hidden = hidden_states(model, ids, layout.positions(), layout)
    factors = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
    (hidden.float() * factors).sum().backward()
    return hidden


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_model_of_fused_layers_equals_the_model(architecture):
    plain, fused = both(config_of(architecture))
    ours = {type(module) for module in fused.modules() if type(module).__module__ == layers.__name__}
    assert {cls.__name__[-3:] for cls in ours} == {"orm", "MLP", "ion"}
    torch.testing.assert_close(outputs(fused), outputs(plain), atol=1e-5, rtol=0)
    assert fused.state_dict().keys() == plain.state_dict().keys()
    for (name, mine), (_, theirs) in zip(fused.named_parameters(), plain.named_parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None
            continue
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-4, msg=name)


def test_bfloat16_differs_from_float32_no_more_than_the_model_does():
    exact, _ = both(config_of("llama"))
    plain, fused = both(config_of("llama"), torch.bfloat16)
    exact.load_state_dict(plain.state_dict())
    truth = outputs(exact)
    distances = [(outputs(model).float() - truth).norm() for model in (plain, fused)]
    assert 0 < distances[1] < 1.2 * distances[0]
    gradients = [
        torch.cat([p.grad.float().flatten() for p in model.model.parameters()]) for model in (exact, plain, fused)
    ]
    errors = [(other - gradients[0]).norm() for other in gradients[1:]]
    assert 0 < errors[1] < 1.2 * errors[0]


def test_numerical_gradients(monkeypatch):
    monkeypatch.setattr(backend, "ELEMENTS_IN_CACHE", 12)  # two of three rows
    norm = LlamaRMSNorm(6).double()
    x, scale, up = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 6), (6,), (3, 6)))
    assert torch.autograd.gradcheck(lambda x, w: backend.RmsNorm.apply(x, w, norm.variance_epsilon), (x, scale))
    assert torch.autograd.gradcheck(backend.Gated.apply, (x, up))
    angles = torch.rand(3, 1, 3, dtype=torch.float64).repeat(1, 1, 2)
    heads = torch.randn(1, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = angles.cos(), angles.sin()
    assert torch.autograd.gradcheck(lambda x: backend.Rotary.apply(x, cos, sin), (heads,))
    expected = apply_rotary_pos_emb(heads, heads, cos[:, 0][None], sin[:, 0][None], unsqueeze_dim=2)[0]
    torch.testing.assert_close(backend.Rotary.apply(heads, cos, sin), expected)


def test_a_copy_computes_with_its_own_weights():
    _, fused = both(config_of("llama"))
    replica = copy.deepcopy(fused)
    with torch.no_grad():
        for parameter in replica.parameters():
            parameter.zero_()
    assert outputs(replica).abs().max() == 0
    assert outputs(fused).abs().max() > 0


def test_another_activation_is_unchanged():
    config = config_of("llama")
    config.hidden_act = "gelu"
    plain, fused = both(config)
    assert any(type(module) is LlamaMLP for module in fused.modules())
    torch.testing.assert_close(outputs(fused), outputs(plain), atol=1e-5, rtol=0)


def test_a_frozen_norm_gets_no_gradient():
    x, weight = torch.randn(3, 4, requires_grad=True), torch.ones(4)
    backend.RmsNorm.apply(x, weight, 1e-6).sum().backward()
    assert weight.grad is None
    assert x.grad is not None
