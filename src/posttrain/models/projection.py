"""Log-probabilities and entropies straight from hidden states and the output projection, with their gradient.

The forward pass goes over chunks of positions, since a log-probability needs a whole row of logits. The backward pass
knows the normalisers already and goes over slices of the vocabulary: each slice of the weight's gradient is one matrix
product that sums over all positions in float32, written once. Logits of a chunk or slice are made again there rather
than kept, and are never more than `elements`.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from posttrain.models.products import product

ELEMENTS_IN_CACHE = 1 << 21
"""Logits in float32 at one time on a CPU: what softmax and its reductions pass over stays in the cache."""
COLUMNS = 256
"""Slices of the vocabulary are multiples of this."""


def projected_scores(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, divisor: float, elements: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of `targets` and entropies, [N] float32 each, in nats, of softmax(hidden @ weight.T / divisor).

    `hidden` [N, h] and `weight` [V, h] have one dtype, `targets` [N] int64. Differentiable in both, any upstream
    gradient. At most `elements` logits (but one row at least) exist at a time.
    """
    return _ProjectedScores.apply(hidden, weight, targets, divisor, elements)


class _ProjectedScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, divisor: float, elements: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count, vocabulary = len(hidden), len(weight)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        normalisers, logprobs, entropies = (hidden.new_empty(count, dtype=wide) for _ in range(3))
        chunk = min(count, max(1, elements // vocabulary))
        rows = max(1, ELEMENTS_IN_CACHE // vocabulary) if hidden.device.type == "cpu" else chunk
        buffer = hidden.new_empty(chunk, vocabulary)
        for start in range(0, count, chunk):
            stop = min(start + chunk, count)
            logits = product(hidden[start:stop], weight.t(), buffer[: stop - start])
            for first in range(start, stop, rows):
                last = min(first + rows, stop)
                scores = _divided(logits[first - start : last - start].to(wide), divisor)
                probabilities = torch.softmax(scores, -1)
                # The largest probability is 1 / sum exp(score - largest score).
                normaliser = scores.amax(-1) - probabilities.amax(-1).log()
                normalisers[first:last] = normaliser
                logprobs[first:last] = scores.gather(1, targets[first:last, None])[:, 0] - normaliser
                entropies[first:last] = normaliser - torch.linalg.vecdot(probabilities, scores)
        ctx.save_for_backward(hidden, weight, targets, normalisers, logprobs, entropies)
        ctx.how = (divisor, elements)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logprobs: torch.Tensor | None, of_entropies: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, normalisers, logprobs, entropies = ctx.saved_tensors
        divisor, elements = ctx.how
        count, vocabulary = len(hidden), len(weight)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        upstream = torch.zeros_like(logprobs) if of_logprobs is None else of_logprobs
        # d logprob / d score_v = [v is the target] - p_v; d entropy / d score_v = -p_v (log p_v + entropy).
        # p_v = exp(score_v - shift) * rest with a shift that the dtype of the scores holds exactly.
        shift = normalisers.to(hidden.dtype)
        rest = (shift - normalisers).exp() / divisor
        factor = -upstream * rest
        at_target = -upstream * torch.expm1(logprobs) / divisor
        if of_entropies is not None:
            factor = factor - of_entropies * rest * (entropies + shift - normalisers)
            at_target = at_target - of_entropies * logprobs.exp() * (logprobs + entropies) / divisor
            slope = -(of_entropies * rest).to(hidden.dtype)[:, None]
        factor, at_target = factor.to(hidden.dtype)[:, None], at_target.to(hidden.dtype)
        hidden_gradient = torch.zeros_like(hidden, dtype=normalisers.dtype) if wants_hidden else None
        weight_gradient = torch.empty_like(weight) if wants_weight else None
        columns = min(vocabulary, max(COLUMNS, elements // count // COLUMNS * COLUMNS))
        buffer = hidden.new_empty(count * columns)
        for start in range(0, vocabulary, columns):
            stop = min(start + columns, vocabulary)
            part = weight[start:stop]
            logits = product(hidden, part.t(), buffer[: count * (stop - start)].view(count, stop - start))
            logs = _divided(logits, divisor).sub_(shift[:, None])
            if of_entropies is None:
                gradient = logs.exp_().mul_(factor)
            else:
                probabilities = logs.exp()
                gradient = logs.mul_(slope).add_(factor).mul_(probabilities)
            # Without a look at which targets are in this slice: on a GPU that would wait for it.
            place = (targets - start).clamp(0, stop - start - 1)[:, None]
            outside = ((targets < start) | (targets >= stop))[:, None]
            gradient.scatter_(1, place, torch.where(outside, gradient.gather(1, place), at_target[:, None]))
            if hidden_gradient is not None:
                hidden_gradient += product(gradient, part)
            if weight_gradient is not None:
                columns_gradient = weight_gradient[start:stop]
                found = product(gradient.t(), hidden, columns_gradient)
                if found is not columns_gradient:
                    columns_gradient.copy_(found)
        if hidden_gradient is not None:
            hidden_gradient = hidden_gradient.to(hidden.dtype)
        return hidden_gradient, weight_gradient, None, None, None


def _divided(scores: torch.Tensor, divisor: float) -> torch.Tensor:
    """In place; a division by 1 is left out."""
    return scores if divisor == 1.0 else scores.div_(divisor)
