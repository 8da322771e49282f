"""Sizes of a model, read from its files or known by its name, without loading weights or using the network.

Not covered: architectures other than plain decoders and decoders with experts in every layer.
"""

import math
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.errors import InputError
from posttrain.models.files import check_files, packaged_file, tensors_of
from posttrain.plugins import require_module
from posttrain.recipe.plan import ModelSizes


def model_sizes(path: str) -> ModelSizes | None:
    """Sizes of the model at `model.path`: from its files, or by its name if they are not on this machine (`PUBLISHED`).

    None for another hub id.

    Raises `InputError` for a file or directory that is not a model.
    """
    if path.startswith("packaged:"):
        name = path.removeprefix("packaged:")
        if name not in PACKAGED_SIZES:
            packaged_file(name)
        return PACKAGED_SIZES[name]
    local = Path(path).expanduser()
    if path.endswith(".gguf"):
        if not local.is_file():
            raise InputError(f"model.path: file {path} does not exist")
        return _of_gguf(local)
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise InputError(f"model.path: {path} is not a model directory: it has no config.json")
        return _of_directory(local)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):
        config = try_to_load_from_cache(path, "config.json")
        if isinstance(config, str):
            return _of_directory(Path(config).parent)
    return published_sizes(path)


def _of_directory(directory: Path) -> ModelSizes:
    from transformers import AutoConfig

    check_files(directory)
    files = directory.glob("*.safetensors")
    try:
        whole = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        config = whole.get_text_config()
        # Recurrent models have no heads, and some have MLPs of the usual width without a key for it.
        heads = getattr(config, "num_attention_heads", None) or 1
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
        inner = getattr(config, "moe_intermediate_size", None) if experts else None
        sizes = ModelSizes(
            parameters=sum(math.prod(shape) for file in files for shape in tensors_of(file).values()),
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=inner or getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            heads=heads,
            key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocabulary=config.vocab_size,
            experts=experts,
            experts_per_token=getattr(config, "num_experts_per_tok", 0) if experts else 0,
            tied=bool(getattr(config, "tie_word_embeddings", getattr(whole, "tie_word_embeddings", False))),
            head_norms=config.model_type.startswith("qwen3"),
        )
    except (OSError, ValueError, AttributeError, KeyError) as error:
        line = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"model.path: {directory}/config.json does not describe a model that transformers supports ({line})"
        ) from error
    return _counted(sizes)


def _of_gguf(file: Path) -> ModelSizes:
    gguf = require_module("gguf", f"model.path: {file}")
    try:
        reader = gguf.GGUFReader(str(file))
        fields: dict[str, Any] = {
            name: field.contents() for name, field in reader.fields.items() if "tokenizer" not in name
        }
        arch = fields["general.architecture"]
        heads, hidden = fields[f"{arch}.attention.head_count"], fields[f"{arch}.embedding_length"]
        embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
        sizes = ModelSizes(
            parameters=sum(int(tensor.n_elements) for tensor in reader.tensors),
            layers=fields[f"{arch}.block_count"],
            hidden=hidden,
            intermediate=fields[f"{arch}.feed_forward_length"],
            heads=heads,
            key_value_heads=fields.get(f"{arch}.attention.head_count_kv", heads),
            head_size=fields.get(f"{arch}.attention.key_length", hidden // heads),
            vocabulary=int(embedding.n_elements) // hidden,
            head_norms=arch.startswith("qwen3"),
        )
    except Exception as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"model.path: {file} is not a complete GGUF model ({line}); download it again") from error
    return _counted(sizes)


def _counted(sizes: ModelSizes) -> ModelSizes:
    return sizes if sizes.parameters else replace(sizes, parameters=sizes.computed_parameters)


PACKAGED_SIZES = {"smollm2-135m": ModelSizes(134_515_008, 30, 576, 1536, 9, 3, 64, 49_152)}
"""Name of a packaged model -> its sizes, which plans need before its weights are installed."""


_SHAPES = {
    "Qwen3-0.6B": ModelSizes(0, 28, 1024, 3072, 16, 8, 128, 151_936),
    "Qwen3-1.7B": ModelSizes(0, 28, 2048, 6144, 16, 8, 128, 151_936),
    "Qwen3-4B": ModelSizes(0, 36, 2560, 9728, 32, 8, 128, 151_936),
    "Qwen3-8B": ModelSizes(0, 36, 4096, 12_288, 32, 8, 128, 151_936, tied=False),
    "Qwen3-14B": ModelSizes(0, 40, 5120, 17_408, 40, 8, 128, 151_936, tied=False),
    "Qwen3-32B": ModelSizes(0, 64, 5120, 25_600, 64, 8, 128, 151_936, tied=False),
    # For models with experts, the third number is the size of one expert.
    "Qwen3-30B-A3B": ModelSizes(0, 48, 2048, 768, 32, 4, 128, 151_936, tied=False, experts=128, experts_per_token=8),
    "Qwen3-235B-A22B": ModelSizes(0, 94, 4096, 1536, 64, 4, 128, 151_936, tied=False, experts=128, experts_per_token=8),
    "Qwen2.5-0.5B": ModelSizes(0, 24, 896, 4864, 14, 2, 64, 151_936),
    "Qwen2.5-1.5B": ModelSizes(0, 28, 1536, 8960, 12, 2, 128, 151_936),
    "Qwen2.5-3B": ModelSizes(0, 36, 2048, 11_008, 16, 2, 128, 151_936),
    "Qwen2.5-7B": ModelSizes(0, 28, 3584, 18_944, 28, 4, 128, 152_064, tied=False),
    "Qwen2.5-14B": ModelSizes(0, 48, 5120, 13_824, 40, 8, 128, 152_064, tied=False),
    "Qwen2.5-32B": ModelSizes(0, 64, 5120, 27_648, 40, 8, 128, 152_064, tied=False),
    "Qwen2.5-72B": ModelSizes(0, 80, 8192, 29_568, 64, 8, 128, 152_064, tied=False),
    "Llama-3-8B": ModelSizes(0, 32, 4096, 14_336, 32, 8, 128, 128_256, tied=False),
    "Llama-3-70B": ModelSizes(0, 80, 8192, 28_672, 64, 8, 128, 128_256, tied=False),
    "Llama-3.1-8B": ModelSizes(0, 32, 4096, 14_336, 32, 8, 128, 128_256, tied=False),
    "Llama-3.1-70B": ModelSizes(0, 80, 8192, 28_672, 64, 8, 128, 128_256, tied=False),
    "Llama-3.1-405B": ModelSizes(0, 126, 16_384, 53_248, 128, 8, 128, 128_256, tied=False),
    "Llama-3.2-1B": ModelSizes(0, 16, 2048, 8192, 32, 8, 64, 128_256),
    "Llama-3.2-3B": ModelSizes(0, 28, 3072, 8192, 24, 8, 128, 128_256),
    "Llama-3.3-70B": ModelSizes(0, 80, 8192, 28_672, 64, 8, 128, 128_256, tied=False),
    "SmolLM-135M": ModelSizes(0, 30, 576, 1536, 9, 3, 64, 49_152),
    "SmolLM-360M": ModelSizes(0, 32, 960, 2560, 15, 5, 64, 49_152),
    "SmolLM-1.7B": ModelSizes(0, 24, 2048, 8192, 32, 32, 64, 49_152),
    "SmolLM2-135M": ModelSizes(0, 30, 576, 1536, 9, 3, 64, 49_152),
    "SmolLM2-360M": ModelSizes(0, 32, 960, 2560, 15, 5, 64, 49_152),
    "SmolLM2-1.7B": ModelSizes(0, 24, 2048, 8192, 32, 32, 64, 49_152),
    "SmolLM3-3B": ModelSizes(0, 36, 2048, 11_008, 16, 4, 128, 128_256),
    "gemma-2-2b": ModelSizes(0, 26, 2304, 9216, 8, 4, 256, 256_000),
    "gemma-2-9b": ModelSizes(0, 42, 3584, 14_336, 16, 8, 256, 256_000),
    "gemma-2-27b": ModelSizes(0, 46, 4608, 36_864, 32, 16, 128, 256_000),
    "gemma-3-270m": ModelSizes(0, 18, 640, 2048, 4, 1, 256, 262_144),
    "gemma-3-1b": ModelSizes(0, 26, 1152, 6912, 4, 1, 256, 262_144),
    # Only the language models, without their image encoders.
    "gemma-3-4b": ModelSizes(0, 34, 2560, 10_240, 8, 4, 256, 262_208),
    "gemma-3-12b": ModelSizes(0, 48, 3840, 15_360, 16, 8, 256, 262_208),
    "gemma-3-27b": ModelSizes(0, 62, 5376, 21_504, 32, 16, 128, 262_208),
}
PUBLISHED = {
    name: replace(_counted(sizes), head_norms=name.lower().startswith("qwen3")) for name, sizes in _SHAPES.items()
}
"""Name of a published model, without its owner and the suffix of a variant -> sizes, for models that are not downloaded."""

_BY_LOWER = {name.lower(): sizes for name, sizes in PUBLISHED.items()}
_VARIANT = re.compile(r"-(instruct|base|chat|thinking|it|pt|\d{4})$")
"""A suffix of a variant with the sizes of the base model. `Qwen3-4B-Thinking-2507` has two such suffixes."""


def published_sizes(path: str) -> ModelSizes | None:
    """Sizes of the published model with this hub id or name, such as `Qwen/Qwen3-8B`; None if it is not in `PUBLISHED`."""
    name = path.rpartition("/")[2].lower().removeprefix("meta-")
    name = re.sub(r"^(qwen2\.5-)(coder|math)-", r"\1", name)
    while name not in _BY_LOWER and (variant := _VARIANT.search(name)):
        name = name[: variant.start()]
    return _BY_LOWER.get(name)
