"""Random models of several sizes for the benchmarks of growth."""

from pathlib import Path
from typing import Any

from harness.models import model_directory

from posttrain.models.policy import Policy
from posttrain.recipe.model import ModelRecipe
from posttrain.seeds import derive_seed


def random_policy(directory: Path, hidden: int, layers: int, threads: int, dtype: Any = "float32") -> Policy:
    """A random Qwen3 with `hidden` units and `layers` layers, written to and loaded from `directory`.

    It has the tokenizer of the small benchmark model, and no end tokens, so that answers have the length asked for.
    """
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    tokenizer = AutoTokenizer.from_pretrained(model_directory("qwen3"))
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed("growth", hidden, layers) % 2**32)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    policy = Policy(ModelRecipe(path=str(directory), dtype=dtype, threads=threads))
    policy.end_tokens = frozenset()
    return policy
