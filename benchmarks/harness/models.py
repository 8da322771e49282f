"""The models that are measured, each a plain directory of float32 weights, made once and kept.

Every side loads the same directory. The cache is `$POSTTRAIN_CACHE`, or `posttrain` in the user's cache directory.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from posttrain.models.load import cache_directory
from posttrain.seeds import derive_seed, random_stream

MODELS = ("smollm2", "qwen3")
VOCABULARY = 4096
"""Tokens of the small random Qwen3."""
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_VERSION = 1
"""Of what `qwen3` is; another version is made again."""


def model_directory(name: str) -> Path:
    """Directory of the model `name`, made on first use. ValueError for an unknown name."""
    if name == "smollm2":
        from posttrain.models.load import resolve_path

        return Path(resolve_path("packaged:smollm2-135m"))
    if name != "qwen3":
        raise ValueError(f"there is no benchmark model {name!r}; there is {', '.join(MODELS)}")
    directory = cache_directory() / f"benchmark-qwen3-{_VERSION}"
    if not (directory / "config.json").is_file():
        # Written aside and renamed, so that a model that was cut short is never used.
        aside = directory.with_name(f"{directory.name}.writing-{os.getpid()}")
        try:
            save_qwen3(aside)
            if not directory.exists():
                aside.rename(directory)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return directory


def computing_dtype(dtype: str | None) -> str:
    """The precision that `model.dtype` selects on this machine's processor."""
    import torch

    from posttrain.models.load import resolve_dtype

    return str(resolve_dtype(dtype, torch.device("cpu"))).removeprefix("torch.")


def emulates_bfloat16() -> str | None:
    """Why sides in bfloat16 are left out on this processor; None if it has instructions for bfloat16."""
    if computing_dtype("auto") == "bfloat16":
        return None
    return "bfloat16 is left out, because this processor has no instructions for it; name a side with --sides to run it"


def save_qwen3(directory: Path) -> None:
    """Write a random Qwen3 of 4.2 million parameters: hidden 256, 4 layers, 4 query and 2 key heads, tied embeddings."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(0, "benchmark model") % 2**32)
        model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_tokenizer() -> Any:
    """A byte-level BPE tokenizer of `VOCABULARY` tokens, trained on made-up words, with a ChatML template."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        _corpus(), vocab_size=VOCABULARY, min_frequency=1, special_tokens=special, show_progress=False
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML
    if len(tokenizer) != VOCABULARY:
        raise RuntimeError(f"the tokenizer has {len(tokenizer)} tokens instead of {VOCABULARY}")
    return tokenizer


def _corpus() -> list[str]:
    """Lines of words of two to four made-up syllables, the words of `data.py` among them."""
    from harness.data import WORDS

    draws = random_stream(0, "benchmark corpus")
    syllables = [
        first + vowel + last for first in "bdfgklmnprstvz" for vowel in "aeiou" for last in ("", "n", "r", "s")
    ]
    words = ["".join(draws.choice(syllables, size=draws.integers(2, 5))) for _ in range(6000)]
    return [" ".join([*draws.choice(words, size=20), *draws.choice(WORDS, size=20)]) for _ in range(2000)]
