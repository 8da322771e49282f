"""Tiny models of every family: they run, mistakes in them would show, and each kind of layer is there."""

import pytest
import torch
from benchmarks.harness import tiny_families as families


def test_every_type_of_transformers_is_there():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert set(families.model_types()) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert set(families.FAMILIES) - set(families.model_types()) == set()
    assert set(families.UNBUILDABLE) < set(families.model_types())
    for model_type in families.UNBUILDABLE:
        with pytest.raises(ValueError, match=model_type):
            families.tiny_model(model_type)


# A window, a recurrent layer, latent attention with experts, ALiBi, a tied head, an encoder, a decoder of a pair, a composite.
@pytest.mark.parametrize(
    "model_type", ["gemma3_text", "qwen3_5_text", "deepseek_v3", "falcon", "gemma", "bert", "bart", "qwen3_5"]
)
def test_a_model_is_causal_and_far_from_even(model_type):
    model, ids = families.tiny_model(model_type), families.random_ids(320)
    assert families.log_probs(model, ids).std() == pytest.approx(families.SPREAD, abs=0.2)
    assert families.reach(model, ids, -1)[:-1].max() < 1e-4
    assert families.reach(model, ids, -6)[-5:].max() > 0.03


def test_a_seed_repeats_a_model_and_leaves_the_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, again, other = (families.tiny_model("llama", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(1), expected)
    ids = families.random_ids(320)
    assert torch.equal(families.log_probs(first, ids), families.log_probs(again, ids))
    assert not torch.equal(families.log_probs(first, ids), families.log_probs(other, ids))


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        ("gemma3_text", {"sliding_attention", "full_attention"}),
        ("llama4_text", {"chunked_attention", "full_attention"}),
        ("jamba", {"linear_attention", "full_attention"}),
        ("lfm3", {"conv", "sliding_attention", "full_attention"}),
        ("nemotron_h", {"linear_attention", "moe", "full_attention", "mlp"}),
    ],
)
def test_a_model_has_every_kind_of_layer_of_its_family(model_type, kinds):
    model = families.tiny_model(model_type, vocabulary=100)
    assert set(model.config.layer_types) == kinds
    assert model.get_output_embeddings().weight.shape[0] == 100


@pytest.mark.parametrize("model_type", ["emu3", "qwen3_5", "dory", "gemma3n_text"])
def test_a_saved_model_is_the_same_when_loaded(model_type, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    model = families.save_tiny(model_type, tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == model_type
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    ids = families.random_ids(320)
    assert torch.equal(families.log_probs(loaded, ids), families.log_probs(model, ids))
