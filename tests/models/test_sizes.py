"""Sizes read from a model's files, without its weights."""

from transformers import Qwen3Config, Qwen3MoeConfig, Qwen3MoeForCausalLM

from posttrain.planning.model_sizes import model_sizes

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def test_a_mixture_of_experts_counts_all_and_names_those_that_a_token_passes(tmp_path):
    config = Qwen3MoeConfig(
        **SHAPE,
        head_dim=8,
        intermediate_size=64,
        moe_intermediate_size=16,
        vocab_size=100,
        num_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    config.save_pretrained(tmp_path)
    found = model_sizes(str(tmp_path))
    assert (found.experts, found.experts_per_token, found.intermediate, found.tied) == (8, 2, 16, False)
    real = sum(parameter.numel() for parameter in Qwen3MoeForCausalLM(config).parameters())
    # Norms of queries and keys are left out of the count: two of head_dim in each layer.
    assert found.parameters == real - 2 * 2 * 8
    assert found.active_layer < found.layer


def test_a_dense_model_has_no_experts(tmp_path):
    Qwen3Config(**SHAPE, intermediate_size=64, vocab_size=100, tie_word_embeddings=True).save_pretrained(tmp_path)
    found = model_sizes(str(tmp_path))
    assert (found.experts, found.experts_per_token, found.intermediate, found.tied) == (0, 0, 64, True)
