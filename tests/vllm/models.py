"""Tiny models with heads of 32 numbers, the fewest that vLLM's kernels for processors take."""

from pathlib import Path

from tests.conftest import make_tokenizer, tiny_config


def save_model(directory: Path, architecture: str = "llama", seed: int = 0, tied: bool = True, heads: int = 2) -> Path:
    """Write a random float32 model of two layers with its tokenizer to `directory`."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = make_tokenizer()
    config = tiny_config(architecture, len(tokenizer))
    config.update({"hidden_size": 64, "num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 32})
    config.tie_word_embeddings = tied
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # Far from uniform, so that greedy answers of two models differ.
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
