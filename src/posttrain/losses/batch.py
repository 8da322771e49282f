"""Inputs of the losses: the sampled tokens of whole streams, flat, without padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Metrics = dict[str, tuple[float, float]]
"""Name -> (sum, count). Sums and counts add up exactly over micro-batches; the mean is sum / count."""


@dataclass(frozen=True)
class TokenBatch:
    """The N sampled tokens of the S streams of one micro-batch, stream after stream. A stream is never split."""

    rollout_logprobs: torch.Tensor
    """[N] float: log-probabilities, in nats, under the policy that sampled the tokens."""
    advantages: torch.Tensor
    """[N] float."""
    stream: torch.Tensor
    """[N] int64: index of each token's stream, 0..S-1."""
    lengths: torch.Tensor
    """[S] int64: sampled tokens of each stream."""
    weights: torch.Tensor
    """[N] float: aggregation weight of each token. The learner divides the weighted sum once per optimizer step."""
    ref_logprobs: torch.Tensor | None = None
    """[N] float: log-probabilities under the reference model."""
    old_logprobs: torch.Tensor | None = None
    """[N] float: the learner's own log-probabilities before the step's updates; None if they equal `rollout_logprobs`."""

    def stream_means(self, values: torch.Tensor) -> torch.Tensor:
        """[N], differentiable: the mean of `values` [N] over the stream of each token."""
        sums = torch.zeros(len(self.lengths), dtype=values.dtype, device=values.device).index_add(
            0, self.stream, values
        )
        return (sums / self.lengths.clamp(min=1))[self.stream]


Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def token_weights(
    kind: Aggregation, lengths: Sequence[int], constant: float | None = None
) -> tuple[list[float], float]:
    """Weight of each stream's tokens, and the divisor of their weighted sum.

    `lengths`: sampled tokens of *all* streams of the optimizer step, including streams that are not computed.

    - `token_mean`: weight 1, divisor sum of lengths (DAPO, arXiv 2503.14476). Biased: the divisor is
      random, and correlates with returns if lengths do.
    - `sequence_mean`: weight 1 / length, divisor number of streams with sampled tokens (GRPO, arXiv 2402.03300). Biased:
      a token of a short answer has more weight than one of a long answer.
    - `constant`: weight 1, divisor `constant` (Dr. GRPO, arXiv 2503.20783). Unbiased up to that constant.

    ValueError if `constant` is needed and missing. A step without sampled tokens has divisor 1.
    """
    if kind == "sequence_mean":
        return [1.0 / n if n else 0.0 for n in lengths], float(sum(n > 0 for n in lengths) or 1)
    if kind == "token_mean":
        return [1.0] * len(lengths), float(sum(lengths) or 1)
    if constant is None:
        raise ValueError("the aggregation `constant` needs its constant")
    return [1.0] * len(lengths), constant
