"""Sizes read from a model's files, without its weights."""

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig, Qwen3MoeForCausalLM

from posttrain.planning.model_sizes import PUBLISHED, model_sizes

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def test_a_mixture_of_experts_counts_all_and_names_those_that_a_token_passes(tmp_path):
    experts = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    config = Qwen3MoeConfig(**SHAPE, **experts, head_dim=8, intermediate_size=64, vocab_size=100)
    config.save_pretrained(tmp_path)
    found = model_sizes(str(tmp_path))
    assert (found.experts, found.experts_per_token, found.intermediate, found.tied) == (8, 2, 16, False)
    real = sum(parameter.numel() for parameter in Qwen3MoeForCausalLM(config).parameters())
    # Norms of queries and keys are left out of the count: two of head_dim in each layer.
    assert found.parameters == real - 2 * 2 * 8
    assert found.active_layer < found.layer
    Qwen3Config(**SHAPE, intermediate_size=64, vocab_size=100, tie_word_embeddings=True).save_pretrained(tmp_path)
    found = model_sizes(str(tmp_path))
    assert (found.experts, found.experts_per_token, found.intermediate, found.tied) == (0, 0, 64, True)


PUBLISHED_COUNTS = """
Qwen3-0.6B=596_049_920 Qwen3-1.7B=1_720_574_976 Qwen3-4B=4_022_468_096 Qwen3-8B=8_190_735_360
Qwen3-14B=14_768_307_200 Qwen3-32B=32_762_123_264 Qwen3-30B-A3B=30_532_122_624 Qwen3-235B-A22B=235_093_634_560
Qwen2.5-0.5B=494_032_768 Qwen2.5-1.5B=1_543_714_304 Qwen2.5-3B=3_085_938_688 Qwen2.5-7B=7_615_616_512
Qwen2.5-14B=14_770_033_664 Qwen2.5-32B=32_763_876_352 Qwen2.5-72B=72_706_203_648 Llama-3-8B=8_030_261_248
Llama-3-70B=70_553_706_496 Llama-3.1-8B=8_030_261_248 Llama-3.1-70B=70_553_706_496 Llama-3.1-405B=405_853_388_800
Llama-3.2-1B=1_235_814_400 Llama-3.2-3B=3_212_749_824 Llama-3.3-70B=70_553_706_496 SmolLM-135M=134_515_008
SmolLM-360M=361_821_120 SmolLM-1.7B=1_711_376_384 SmolLM2-135M=134_515_008 SmolLM2-360M=361_821_120
SmolLM2-1.7B=1_711_376_384 SmolLM3-3B=3_075_098_624 gemma-2-2b=2_614_341_888 gemma-2-9b=9_241_705_984
gemma-2-27b=27_227_128_320 gemma-3-270m=268_098_176 gemma-3-1b=999_885_952 gemma-3-4b=3_880_099_328
gemma-3-12b=11_766_034_176 gemma-3-27b=27_009_002_240
"""
PARAMETERS = {name: int(count) for name, count in (pair.split("=") for pair in PUBLISHED_COUNTS.split())}
"""Parameters of the published weights. Of the larger Gemma 3, those of the language model alone."""


def test_the_sizes_of_published_models_give_their_numbers_of_parameters():
    assert set(PARAMETERS) == set(PUBLISHED)
    for name, parameters in PARAMETERS.items():
        # Biases and norms inside attention are not in the formula.
        assert PUBLISHED[name].parameters == pytest.approx(parameters, rel=3e-4), name


def test_a_hub_id_has_the_sizes_of_its_model():
    for path, name in {
        "Qwen/Qwen3-8B-Base": "Qwen3-8B",
        "Qwen/Qwen3-4B-Thinking-2507": "Qwen3-4B",
        "Qwen/Qwen2.5-Coder-7B-Instruct": "Qwen2.5-7B",
        "meta-llama/Meta-Llama-3.1-8B-Instruct": "Llama-3.1-8B",
        "HuggingFaceTB/SmolLM2-135M-Instruct": "SmolLM2-135M",
        "google/gemma-3-1b-it": "gemma-3-1b",
    }.items():
        assert model_sizes(path) == PUBLISHED[name], path
    for path in ("Qwen/Qwen3-8B-AWQ", "Qwen/Qwen3-Embedding-8B", "runs/sft/model"):
        assert model_sizes(path) is None
