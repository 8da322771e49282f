"""Sizes of published models, from their configurations."""

from dataclasses import replace

from posttrain.recipe.memory import ModelSizes


def _sized(sizes: ModelSizes) -> ModelSizes:
    return replace(sizes, parameters=sizes.computed_parameters)


QWEN3_4B = _sized(ModelSizes(0, 36, 2560, 9728, 32, 8, 128, 151_936))
QWEN3_32B = _sized(ModelSizes(0, 64, 5120, 25_600, 64, 8, 128, 151_936, tied=False))
QWEN3_235B = _sized(ModelSizes(0, 94, 4096, 1536, 64, 4, 128, 151_936, experts=128, experts_per_token=8, tied=False))
"""Qwen3-235B-A22B: `intermediate` is that of one expert."""
QWEN3_30B = _sized(ModelSizes(0, 48, 2048, 768, 32, 4, 128, 151_936, experts=128, experts_per_token=8, tied=False))
"""Qwen3-30B-A3B."""
QWEN25_05B = _sized(ModelSizes(0, 24, 896, 4864, 14, 2, 64, 151_936))
QWEN25_3B = _sized(ModelSizes(0, 36, 2048, 11_008, 16, 2, 128, 151_936))
QWEN25_7B = _sized(ModelSizes(0, 28, 3584, 18_944, 28, 4, 128, 152_064, tied=False))

PUBLISHED = {
    "Qwen3-4B": QWEN3_4B,
    "Qwen3-4B-Thinking-2507": QWEN3_4B,
    "Qwen3-32B": QWEN3_32B,
    "Qwen3-30B-A3B": QWEN3_30B,
    "Qwen3-235B-A22B": QWEN3_235B,
    "Qwen2.5-0.5B-Instruct": QWEN25_05B,
    "Qwen2.5-3B-Instruct": QWEN25_3B,
    "Qwen2.5-7B-Instruct": QWEN25_7B,
}
"""Name, without its owner -> sizes, for plans where the model's files are not at hand."""
