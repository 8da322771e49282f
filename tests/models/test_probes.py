"""One pass for all beginnings of an answer gives what separate passes give; so does the attention it is read from."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.models.layers import Heads, causal_attention
from posttrain.models.packing import probed_layout
from posttrain.models.reward import RewardModel
from posttrain.recipe.model import ModelRecipe
from tests.conftest import save_tiny_model


def sliding_mistral(directory):
    from transformers import AutoModelForCausalLM, MistralConfig

    from tests.conftest import make_tokenizer

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(
        vocab_size=len(tokenizer), num_key_value_heads=2, head_dim=8, sliding_window=5, eos_token_id=2, **sizes
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=["llama", "qwen3", "sliding mistral"])
def model(request, tmp_path_factory) -> RewardModel:
    folder = tmp_path_factory.mktemp("probes")
    path = sliding_mistral(folder) if "mistral" in request.param else save_tiny_model(folder, request.param)
    return RewardModel(ModelRecipe(path=str(path)), seed=1)


def separate(model, ids, seen):
    """Each beginning on its own, the end token behind it where it has none."""
    texts = [ids[:n] if ids[n - 1] in model.end_tokens else np.append(ids[:n], model.end_token) for n in seen]
    with torch.no_grad():
        return torch.cat([model.rewards([t], [np.arange(len(t)) > 0]) for t in texts]).numpy()


def test_probes_equal_separate_passes(model):
    rng = np.random.default_rng(0)
    streams = [rng.integers(3, 250, n) for n in (40, 7, 150)]
    streams[0][[20, 39]] = model.end_token  # a beginning that ends with an end token is read as it is
    seen = [np.array([3, 21, 22, 40]), np.array([1, 7]), np.array([5, 128, 129, 150])]
    together = model.prefix_rewards(streams, seen)
    for ids, places, values in zip(streams, seen, together, strict=True):
        expected = separate(model, ids, places.tolist())
        assert np.ptp(expected) > 1e-3
        np.testing.assert_allclose(values, expected, atol=1e-5)


@given(st.lists(st.tuples(st.integers(1, 70), st.lists(st.integers(1, 70), max_size=4)), min_size=1, max_size=3))
@settings(max_examples=25, deadline=None)
def test_a_probe_sees_its_beginning_and_itself(streams):
    streams = [(length, [min(n, length) for n in seen]) for length, seen in streams]
    layout = probed_layout(streams)
    total = sum(length + len(seen) for length, seen in streams)
    generator = torch.Generator().manual_seed(total)
    query, key, value = (torch.randn(heads, total, 8, generator=generator) for heads in (4, 2, 2))
    found = layout.attend(0, Heads(query, key, value, 0.3, None))
    assert len(layout.positions()) == total
    start = 0
    for length, seen in streams:
        own = slice(start, start + length)
        expected = causal_attention(Heads(query[:, own], key[:, own], value[:, own], 0.3, None))
        torch.testing.assert_close(found[:, own], expected, atol=1e-5, rtol=1e-5)
        for i, n in enumerate(seen):
            rows = [*range(start, start + n), start + length + i]
            expected = causal_attention(Heads(query[:, rows], key[:, rows], value[:, rows], 0.3, None))[:, -1]
            torch.testing.assert_close(found[:, start + length + i], expected, atol=1e-5, rtol=1e-5)
            assert layout.positions()[start + length + i] == n
        start += length + len(seen)
