"""The package's loss and gradient, read from one optimizer step through the public names."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness.models import make_tokenizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import posttrain
from posttrain.episode import Advantages, Episode

NO_CLIP = 1e30


def save_model(directory: Path, seed: int = 0) -> Path:
    """A random Llama of two layers with grouped key heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def moved_policy(directory: Path, seed: int = 1, distance: float = 0.02) -> posttrain.Policy:
    """A policy whose weights have left those of the reference model."""
    policy = posttrain.Policy(str(directory), threads=1)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(distance * torch.randn(parameter.shape, generator=generator))
    return policy


def one_step(
    policy: posttrain.Policy, episodes: Sequence[Episode], credit: Advantages, steps: int = 1, **learner: Any
) -> tuple[float, dict[str, torch.Tensor], Mapping[str, float]]:
    """Loss, gradient by parameter, and metrics of an optimizer step. The weights are restored.

    A step without signal has loss 0 and no gradient.
    """
    names = {id(parameter): name for name, parameter in policy.model.named_parameters()}
    before = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    found: dict[str, torch.Tensor] = {}

    def read(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    found[names[id(parameter)]] = parameter.grad.detach().clone()

    handle = register_optimizer_step_pre_hook(read)
    try:
        metrics = posttrain.Learner(policy, learning_rate=1e-30, max_gradient_norm=NO_CLIP, **learner).update(
            episodes, credit
        )
    finally:
        handle.remove()
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                parameter.copy_(before[name])
    return metrics.get("loss/total", 0.0), found, metrics
