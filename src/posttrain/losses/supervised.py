"""The supervised loss."""

import torch

from posttrain.losses.batch import TokenBatch


def nll(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """sum over tokens of weight x -log pi: negative log-likelihood in nats, a scalar to minimise; `logprobs` [N]."""
    return -(batch.weights * logprobs).sum()
