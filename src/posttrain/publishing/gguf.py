"""Write a model as a GGUF file with the `gguf` package, and check it by loading it again."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from posttrain.data.rendering import end_token_of
from posttrain.errors import InputError, RunError
from posttrain.plugins import require_module

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""`model_type` of transformers -> architecture of GGUF."""
TYPES = {"f32": 1e-5, "f16": 2e-3, "bf16": 2e-2, "q8_0": 5e-2}
"""Type of the weights -> maximum difference of the logits from those of the model, as a share of their size."""
_CHECKED = "The quick brown fox, 3 x 14 = 42; naïve café.\n    return x"
_NORMAL, _CONTROL, _USER = 1, 3, 4
"""Token types of the format."""


@dataclass(frozen=True)
class Check:
    """Comparison of the written file with the model: relative difference of the logits, agreement of the best token."""

    difference: float
    agreement: float


def write_gguf(directory: Path, file: Path, kind: str = "f16", name: str = "model") -> Check:
    """Write the model in `directory` to `file`, load the file with transformers, and compare the logits.

    Args:
        directory: an exported model without adapters.
        file: path of the `.gguf` file.
        kind: one of `TYPES`. Vectors and norms are always float32.
        name: the model's name in the file.

    Raises:
        InputError: the architecture or the tokenizer has no counterpart in the format.
        RunError: the results of the file differ from those of the model. The file is deleted.
    """
    gguf = require_module("gguf", "posttrain export --to gguf")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if kind not in TYPES:
        raise InputError(f"--type {kind} is not supported; use {', '.join(TYPES)}")
    config = AutoConfig.from_pretrained(directory)
    if config.model_type not in ARCHITECTURES:
        raise InputError(
            f"{directory}: GGUF export supports {', '.join(ARCHITECTURES)}, not {config.model_type}; export with --to hf, and convert "
            "that folder with llama.cpp's convert_hf_to_gguf.py"
        )
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    pre = pre_tokenizer(json.loads(tokenizer.backend_tokenizer.to_str()), directory)
    architecture = ARCHITECTURES[config.model_type]
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(file, architecture)
    _write_settings(writer, config, name, kind, gguf)
    _write_tokenizer(writer, tokenizer, pre, config.vocab_size)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    for title, tensor in _tensors(model, architecture == "llama"):
        place = names.get_name(title, try_suffixes=(".weight", ".bias"))
        if place is None:
            raise InputError(
                f"{directory}: GGUF has no place for the weights {title} of {architecture}; export with --to hf"
            )
        _add(writer, place, tensor, kind, gguf)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    check = compare(model, tokenizer, file)
    if not check.difference <= TYPES[kind]:
        file.unlink()
        raise RunError(
            f"{file}: the logits of the written file differ by {100 * check.difference:.3g}% from those of the model, more than "
            f"{kind} explains; export with --to hf instead"
        )
    return check


def pre_tokenizer(tokenizer: dict[str, Any], directory: Path) -> str:
    """GGUF's name of the tokenizer's pre-tokenization. InputError if GGUF has no name for it."""
    if tokenizer["model"]["type"] != "BPE" or tokenizer["model"].get("byte_fallback"):
        raise InputError(f"{directory}: GGUF export supports byte-level BPE tokenizers only; export with --to hf")
    outer = tokenizer.get("pre_tokenizer") or {}
    steps = outer.get("pretokenizers", [outer])
    kinds = [step.get("type") for step in steps]
    pattern = next((str(step["pattern"].get("Regex", "")) for step in steps if step.get("type") == "Split"), "")
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and r"\p{N}{1,3}" in pattern:
        return "llama-bpe"
    if kinds == ["Split", "ByteLevel"] and r"|\p{N}|" in pattern:
        return "qwen2"
    raise InputError(
        f"{directory}: GGUF has no name for how this tokenizer splits text ({', '.join(map(str, kinds))}); export with --to hf"
    )


def _write_settings(writer: Any, config: Any, name: str, kind: str, gguf: Any) -> None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise InputError(f"GGUF export supports plain rotary positions, not {rope['rope_type']}; export with --to hf")
    head = _head_dim(config)
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(float(rope.get("rope_theta", getattr(config, "rope_theta", 10_000.0))))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type({"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _write_tokenizer(writer: Any, tokenizer: "PreTrainedTokenizerBase", pre: str, size: int) -> None:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {token["id"]: token for token in backend["added_tokens"]}
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(size)]
    kinds = [
        (_CONTROL if added[number]["special"] else _USER) if number in added else _NORMAL if number in by_id else _USER
        for number in range(size)
    ]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in backend["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    for number, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.eos_token_id, writer.add_eos_token_id),
        (end_token_of(tokenizer), writer.add_eot_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
    ):
        if number is not None:
            add(number)
    writer.add_add_bos_token(False)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _tensors(model: Any, permuted: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Names and weights. `permuted`: query and key rows are reordered for interleaved rotary positions."""
    config = model.config
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().contiguous().numpy()
        if permuted and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        yield name, values


def _add(writer: Any, name: str, values: np.ndarray, kind: str, gguf: Any) -> None:
    """Add a tensor. Matrices have the type `kind` if the size of their rows allows it; vectors are float32."""
    types = gguf.GGMLQuantizationType
    if values.ndim == 1 or kind == "f32" or (kind == "q8_0" and values.shape[-1] % 32):
        writer.add_tensor(name, values.astype(np.float32))
    elif kind == "f16":
        writer.add_tensor(name, values.astype(np.float16))
    else:
        quantized = types.BF16 if kind == "bf16" else types.Q8_0
        writer.add_tensor(name, gguf.quantize(values, quantized), raw_dtype=quantized)


def load_gguf(file: Path, head_dim: int | None = None) -> tuple[Any, Any]:
    """The model and the tokenizer of a file as transformers reads them, in float32.

    `head_dim`: size of an attention head, which transformers does not read from files of Qwen3.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder, name = str(file.parent), file.name
    config = AutoConfig.from_pretrained(folder, gguf_file=name)
    if head_dim is not None:
        config.head_dim = head_dim
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, config=config, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    return model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=name)


def compare(model: Any, tokenizer: Any, file: Path) -> Check:
    """Load the file with transformers and compare tokens and logits. RunError if the tokens differ."""
    loaded, again = load_gguf(file, _head_dim(model.config))
    if again.get_vocab() != tokenizer.get_vocab():
        differing = set(again.get_vocab().items()) ^ set(tokenizer.get_vocab().items())
        padding = {token for token, _ in differing if token.startswith("[PAD")}
        if len(padding) != len(differing):
            raise RunError(
                f"{file}: {len(differing)} tokens of the vocabulary differ after loading; export with --to hf"
            )
    generator = torch.Generator().manual_seed(0)
    words = tokenizer(_CHECKED, add_special_tokens=False).input_ids
    random = torch.randint(0, min(len(tokenizer), model.config.vocab_size), (48,), generator=generator).tolist()
    ids = torch.tensor([[*words, *random]])
    with torch.no_grad():
        expected, reloaded = (one.eval()(input_ids=ids).logits.double() for one in (model, loaded))
    scale = float(expected.std()) or 1.0
    difference = float((expected - reloaded).pow(2).mean().sqrt()) / scale
    agreement = float((expected.argmax(-1) == reloaded.argmax(-1)).double().mean())
    return Check(difference if math.isfinite(difference) else math.inf, agreement)
