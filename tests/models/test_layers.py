"""Packed and fused forward passes equal those of transformers, in values, gradients, names and weights."""

import copy
import inspect
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from posttrain.errors import InputError
from posttrain.models import layers
from posttrain.models.cpu import backend
from posttrain.models.forward import ForwardPath, hidden_states, token_scores
from posttrain.models.gate import use_path
from posttrain.models.layers import resolve_fused, use_fused_layers
from posttrain.models.policy import Policy
from posttrain.recipe.model import ModelRecipe
from tests.conftest import tiny_config
from tests.models import fake_liger
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
    use_path(plain, ForwardPath())
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


def assert_equal(plain, fused):
    """Hidden states and gradients."""
    torch.testing.assert_close(outputs(fused), outputs(plain), atol=1e-5, rtol=0)
    for (name, mine), (_, theirs) in zip(fused.named_parameters(), plain.named_parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_model_of_fused_layers_equals_the_model(architecture):
    plain, fused = both(config_of(architecture))
    ours = {type(module) for module in fused.modules() if type(module).__module__ == layers.__name__}
    assert {cls.__name__[-3:] for cls in ours} == {"orm", "MLP", "ion"}
    assert_equal(plain, fused)
    assert fused.state_dict().keys() == plain.state_dict().keys()


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
    plain.model.norm.requires_grad_(False)
    fused.model.norm.requires_grad_(False)  # a frozen norm gets no gradient
    assert_equal(plain, fused)


def model_with(fused, architecture):
    plain, _ = both(tiny_config(architecture, 100))
    made = copy.deepcopy(plain)
    use_fused_layers(made, fused)
    return plain, made


@pytest.fixture
def liger(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", fake_liger.ops())
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", fake_liger.ops())
    layers.liger.cache_clear()
    yield
    layers.liger.cache_clear()


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_ligers_functions_get_their_arguments(architecture, liger):
    plain, fused = model_with("liger", architecture)
    assert {module.functions for module in fused.modules() if hasattr(module, "functions")} == {layers.liger()}
    assert_equal(plain, fused)


def test_ligers_functions_have_the_arguments_of_the_tests():
    ops = pytest.importorskip(
        "liger_kernel.ops", reason="needs liger-kernel, which needs Triton: pip install liger-kernel"
    )
    for name in ("LigerRMSNormFunction", "LigerSiLUMulFunction", "LigerRopeFunction"):
        real = list(inspect.signature(getattr(ops, name).forward).parameters)[1:]  # without the context
        assert list(inspect.signature(getattr(fake_liger, name).apply).parameters) == real


def test_what_each_choice_selects(tiny_model, monkeypatch):
    policy = Policy(ModelRecipe(path=str(tiny_model), fused="none"))
    assert not any(hasattr(module, "functions") for module in policy.model.modules())
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    installed = {"liger_kernel": None}
    monkeypatch.setattr(layers, "find_spec", installed.get)
    assert (resolve_fused("auto", cpu), resolve_fused("auto", gpu)) == ("own", "own")
    installed["liger_kernel"] = True
    assert (resolve_fused("auto", cpu), resolve_fused("auto", gpu)) == ("own", "liger")
    with pytest.raises(InputError, match=r"model\.fused: Liger's kernels need a GPU; use auto"):
        resolve_fused("liger", cpu)

    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    layers.liger.cache_clear()
    with pytest.raises(InputError, match=r"model\.fused liger needs the package liger-kernel.*pip install"):
        use_fused_layers(both(tiny_config("llama", 100))[0], "liger")


LENGTHS = [5, 1, 17, 9]


def _models(config):
    """The same random weights twice: for the padded and for the packed forward."""
    torch.manual_seed(1)
    padded = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    packed = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).eval()
    packed.load_state_dict(padded.state_dict())
    use_path(packed, ForwardPath())
    return padded, packed


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_packed_equals_padded(architecture):
    padded, packed = _models(config_of(architecture))
    rng = np.random.default_rng(0)
    streams = [torch.from_numpy(rng.integers(0, 100, n)) for n in LENGTHS]
    width = max(LENGTHS)
    ids = torch.stack([torch.nn.functional.pad(s, (0, width - len(s))) for s in streams])
    mask = torch.stack([(torch.arange(width) < len(s)).long() for s in streams])
    expected = padded(input_ids=ids, attention_mask=mask).logits
    layout = bundle_layout([(n, []) for n in LENGTHS])
    hidden = hidden_states(packed, torch.cat(streams), layout.positions(), layout)
    logits = packed.get_output_embeddings()(hidden)
    for part, row, length in zip(logits.split(LENGTHS), expected, LENGTHS, strict=True):
        torch.testing.assert_close(part, row[:length], atol=1e-5, rtol=0)


def test_gradients_of_packed_scores_equal_padded():
    padded, packed = _models(tiny_config("llama", 100))
    rng = np.random.default_rng(2)
    streams = [torch.from_numpy(rng.integers(0, 100, n)) for n in (6, 11)]
    loss = sum(
        torch.log_softmax(padded(input_ids=s[None]).logits[0, :-1] / 0.7, -1).gather(1, s[1:, None]).sum()
        for s in streams
    )
    loss.backward()
    layout = bundle_layout([(6, []), (11, [])])
    ids = torch.cat(streams)
    targets = torch.tensor([*range(1, 6), *range(7, 17)])
    hidden = hidden_states(packed, ids, layout.positions(), layout)
    scores = token_scores(packed, hidden[targets - 1], ids[targets], 0.7, positions_per_chunk=4)
    scores.logprobs.sum().backward()
    torch.testing.assert_close(scores.logprobs.sum(), loss, atol=1e-4, rtol=0)
    for (name, mine), (_, theirs) in zip(packed.named_parameters(), padded.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-4, msg=name)


def test_entropy_and_its_gradient():
    _, model = _models(tiny_config("llama", 100))
    hidden = torch.randn(7, 32, requires_grad=True)
    targets = torch.arange(7)
    logits = model.get_output_embeddings()(hidden)
    expected = torch.distributions.Categorical(logits=logits / 1.3).entropy()
    (reference,) = torch.autograd.grad(expected.sum(), hidden)
    scores = token_scores(model, hidden, targets, 1.3, positions_per_chunk=3)
    torch.testing.assert_close(scores.entropies, expected)
    (gradient,) = torch.autograd.grad(scores.entropies.sum(), hidden)
    torch.testing.assert_close(gradient, reference, atol=1e-6, rtol=1e-4)


def test_full_logits_never_exist():
    """Nothing as large as [positions, vocabulary] is kept for the backward pass."""
    _, model = _models(tiny_config("llama", 100))
    nothing = token_scores(model, torch.zeros(0, 32), torch.zeros(0, dtype=torch.int64), 1.0, 4)
    assert nothing.logprobs.shape == (0,)
    hidden = torch.randn(64, 32, requires_grad=True)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        token_scores(model, hidden, torch.arange(64) % 100, 1.0, positions_per_chunk=8)
    assert max(sizes, default=0) < 64 * 100
