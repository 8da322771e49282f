"""The sizes of a model from its files, without loading weights and without a network.

Not covered: models whose sizes are not those of a plain decoder or of one with experts in every layer.
"""

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.errors import InputError
from posttrain.models.packaged import packaged_file
from posttrain.recipe.memory import ModelSizes


def model_sizes(path: str) -> ModelSizes | None:
    """Sizes of the model that `model.path` names; None where nothing of it is on this machine.

    `InputError` for a file or directory that is there and is no model.
    """
    if path.startswith("packaged:"):
        try:
            return _of_gguf(packaged_file(path.removeprefix("packaged:")))
        except InputError as error:
            if "needs the weights" in str(error):
                return None
            raise
    local = Path(path).expanduser()
    if path.endswith(".gguf"):
        if not local.is_file():
            raise InputError(f"model.path: there is no file {path}")
        return _of_gguf(local)
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise InputError(f"model.path: {path} is not a model directory: it has no config.json")
        return _of_directory(local)
    return _of_cached(path)


def _of_cached(hub_id: str) -> ModelSizes | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(hub_id, "config.json")
    except HFValidationError:
        return None
    return _of_directory(Path(config).parent) if isinstance(config, str) else None


def _of_directory(directory: Path) -> ModelSizes:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True).get_text_config()
        heads = config.num_attention_heads
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
        inner = getattr(config, "moe_intermediate_size", None) if experts else None
        sizes = ModelSizes(
            parameters=_stored_parameters(directory),
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=inner or config.intermediate_size,
            heads=heads,
            key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocabulary=config.vocab_size,
            experts=experts,
            experts_per_token=getattr(config, "num_experts_per_tok", 0) if experts else 0,
            tied=bool(config.tie_word_embeddings),
        )
    except (OSError, ValueError, AttributeError, KeyError) as error:
        line = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"model.path: {directory}/config.json does not describe a model transformers knows ({line})"
        ) from error
    return _counted(sizes)


def _of_gguf(file: Path) -> ModelSizes:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(file))
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
        )
    except Exception as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"model.path: {file} is not a whole GGUF model ({said}); fetch it again") from error
    return _counted(sizes)


def _counted(sizes: ModelSizes) -> ModelSizes:
    return sizes if sizes.parameters else replace(sizes, parameters=sizes.computed_parameters)


def _stored_parameters(directory: Path) -> int:
    """Elements of all tensors in the directory's safetensors files, from their headers; 0 when there are none."""
    count = 0
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with file.open("rb") as source:
                (length,) = struct.unpack("<Q", source.read(8))
                header = json.loads(source.read(min(length, 100_000_000)))
        except (OSError, ValueError, struct.error):
            raise InputError(f"model.path: {file} is not a whole safetensors file; fetch it again") from None
        for name, tensor in header.items():
            if name != "__metadata__":
                elements = 1
                for size in tensor["shape"]:
                    elements *= size
                count += elements
    return count
