"""What every loss sees: the sampled tokens of whole streams, flat, without padding."""

from dataclasses import dataclass

import torch

Metrics = dict[str, tuple[float, float]]
"""Name -> (sum, count); they add up exactly over micro-batches, and the mean is sum / count."""


@dataclass(frozen=True)
class TokenBatch:
    """The N sampled tokens of the S streams of one micro-batch, stream after stream; a stream is never divided."""

    behaviour: torch.Tensor
    """[N] float: log-probabilities, in nats, of the policy that sampled."""
    advantages: torch.Tensor
    """[N] float."""
    stream: torch.Tensor
    """[N] int64: index of each token's stream, 0..S-1."""
    lengths: torch.Tensor
    """[S] int64: sampled tokens of each stream."""
    weights: torch.Tensor
    """[N] float: the normaliser's weight of each token; the learner divides the weighted sum, once."""
    reference: torch.Tensor | None = None
    """[N] float: log-probabilities under the reference model."""
    old: torch.Tensor | None = None
    """[N] float: the learner's own log-probabilities before the step's updates; None takes `behaviour` for them."""

    def stream_means(self, values: torch.Tensor) -> torch.Tensor:
        """Mean of `values` [N] over each token's stream, given back at each of its tokens: [N], differentiable."""
        sums = torch.zeros(len(self.lengths), dtype=values.dtype, device=values.device).index_add(
            0, self.stream, values
        )
        return (sums / self.lengths.clamp(min=1))[self.stream]
