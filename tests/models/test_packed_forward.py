"""The packed forward equals the plain padded forward of transformers."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.models.forward import hidden_states, token_scores
from posttrain.models.layers import use_packed_attention
from tests.conftest import tiny_config
from tests.models.bundles import bundle_layout
from tests.models.test_layers_cpu import config_of

LENGTHS = [5, 1, 17, 9]


def _models(config):
    """The same random weights twice: for the padded and for the packed forward."""
    torch.manual_seed(1)
    padded = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    packed = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).eval()
    packed.load_state_dict(padded.state_dict())
    use_packed_attention(packed)
    return padded, packed


def _compare(config):
    padded, packed = _models(config)
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


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_packed_equals_padded(architecture):
    _compare(config_of(architecture))


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


def test_no_positions_give_no_scores():
    _, model = _models(tiny_config("llama", 100))
    scores = token_scores(model, torch.zeros(0, 32), torch.zeros(0, dtype=torch.int64), 1.0, 4)
    assert scores.logprobs.shape == (0,)


def test_full_logits_never_exist():
    """Nothing as large as [positions, vocabulary] is kept for the backward pass."""
    _, model = _models(tiny_config("llama", 100))
    hidden = torch.randn(64, 32, requires_grad=True)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        token_scores(model, hidden, torch.arange(64) % 100, 1.0, positions_per_chunk=8)
    assert max(sizes, default=0) < 64 * 100
