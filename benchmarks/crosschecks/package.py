"""The package's loss and gradient, read from one optimizer step through the public names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from harness.models import make_tokenizer

import posttrain
from posttrain.episode import Advantages, Episode, RewardStreams
from posttrain.recipe.loss import KlRecipe
from posttrain.recipe.rollout import RolloutRecipe
from posttrain.training.controllers import RewardShaping, RunningStatistics
from posttrain.training.updater import samples_of_episodes

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


@dataclass
class Update:
    """An optimizer step of the package, before its weights changed."""

    loss: float
    gradient: dict[str, torch.Tensor]
    """By parameter. Empty for a step without signal."""
    weights: dict[str, torch.Tensor]
    metrics: Mapping[str, float]


def last_update(
    policy: posttrain.Policy,
    episodes: Sequence[Episode],
    credit: Advantages,
    updates: int = 1,
    learning_rate: float = 0.003,
    **learner: Any,
) -> Update:
    """The last of several updates on the same episodes (PPO epochs). Weights and their version are restored afterwards."""
    names = {id(parameter): name for name, parameter in policy.model.named_parameters()}
    before, version = _weights(policy), policy.version
    weights = before
    gradient: dict[str, torch.Tensor] = {}

    made = posttrain.Learner(policy, learning_rate=learning_rate, max_gradient_norm=NO_CLIP, **learner)
    step = made.optimizer.step

    def read_and_step() -> float:
        trained = [each for each in made.optimizer.trained if each.gradient is not None]
        gradient.update((names[id(each.parameter)], each.gradient.detach().clone()) for each in trained)
        return step()

    try:
        for _ in range(updates):
            weights = _weights(policy)
            gradient.clear()
            with mock.patch.object(made.optimizer, "step", read_and_step):
                metrics = made.update(episodes, credit)
    finally:
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                parameter.copy_(before[name])
        policy.version = version
    return Update(metrics.get("loss/total", 0.0), dict(gradient), weights, metrics)


def rewards_with_kl(episodes: Sequence[Episode], kl: Mapping[str, Any], ref: Sequence[np.ndarray]) -> RewardStreams:
    """The reward streams of a step of `rl` with the KL penalty in the reward. `ref`: per stream, [n] of its sampled tokens."""
    samples = samples_of_episodes(episodes, 0)
    for sample, logprobs in zip(samples, ref, strict=True):
        sample.ref_logprobs = logprobs.astype(np.float32)
    shaping = RewardShaping(RolloutRecipe(), KlRecipe(**kl), RunningStatistics(None))
    return shaping.shape(episodes, samples, kl["coefficient"])


def _weights(policy: posttrain.Policy) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
