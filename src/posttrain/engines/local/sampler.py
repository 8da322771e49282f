"""Sample tokens from logits with one uniform number per token, by inverting the cumulative distribution."""

from collections.abc import Sequence

import torch

from posttrain.recipe.rollout import SamplingRecipe

BLOCK = 256
"""Tokens per block: the block is found from block sums, then the token within the block."""
CANDIDATES = 512
"""Number of most probable tokens in which the top-p cut is searched first."""


def sample(
    logits: torch.Tensor, sampling: Sequence[SamplingRecipe], draws: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample tokens [B] int64 with log-probabilities [B] float32 from logits [B, vocabulary] float32, which are overwritten.

    Row b uses `sampling[b]` and the uniform number `draws[b]` in [0, 1). The log-probability is that of
    softmax(logits / temperature) over the whole vocabulary, before truncation. Raises FloatingPointError for non-finite
    logits.
    """
    greedy = [s.temperature == 0 for s in sampling]
    temperatures = [1.0 if cold else s.temperature for cold, s in zip(greedy, sampling, strict=True)]
    if any(temperature != 1 for temperature in temperatures):
        logits /= torch.tensor(temperatures, dtype=torch.float32, device=logits.device)[:, None]
    largest = logits.amax(-1)
    if not bool(torch.isfinite(largest).all()):
        raise FloatingPointError("the model's logits are not finite")
    weights = torch.exp_(logits - largest[:, None])
    total = weights.sum(-1)
    if all(greedy):
        return logits.argmax(-1), -total.log()
    cut = [b for b, s in enumerate(sampling) if s.top_k or s.top_p < 1 or s.min_p > 0]
    kept = weights
    if cut:
        kept = weights.clone()
        kept[cut] = truncate(weights[cut], [sampling[b] for b in cut])
    tokens = _draw(kept, draws)
    if any(greedy):
        tokens = torch.where(torch.tensor(greedy, device=logits.device), logits.argmax(-1), tokens)
    chosen = logits.gather(1, tokens[:, None])[:, 0] - largest
    return tokens, chosen - total.log()


def _draw(weights: torch.Tensor, draws: Sequence[float]) -> torch.Tensor:
    """For each row of `weights` [B, V] >= 0, the first token [B] at which the running sum exceeds draw x total.

    The running sum of blocks finds the block, and the running sum within it the token, so one pass over the weights is
    enough. Sums are in float64: over 50,000 terms, the error of a float32 sum exceeds the smallest relevant probabilities.
    """
    rows, vocabulary = weights.shape
    whole = -(-vocabulary // BLOCK) * BLOCK
    blocks = torch.nn.functional.pad(weights, (0, whole - vocabulary)).view(rows, -1, BLOCK)
    ends = blocks.sum(-1).double().cumsum(-1)
    total = ends[:, -1:]
    points = torch.tensor(list(draws), dtype=torch.float64, device=weights.device)[:, None] * total
    # Rounding must not raise a point to the total, which lies beyond the last token with any weight.
    points = torch.minimum(points, torch.nextafter(total, torch.zeros_like(total)))
    block = torch.searchsorted(ends, points, right=True)
    before = torch.nn.functional.pad(ends, (1, 0)).gather(1, block)
    inside = blocks[torch.arange(rows, device=weights.device), block[:, 0]].double()
    index = torch.searchsorted(inside.cumsum(-1), points - before, right=True)
    # Nor beyond the last such token of the block: block sums are rounded to float32.
    last = BLOCK - 1 - (inside > 0).flip(-1).int().argmax(-1, keepdim=True)
    return (block * BLOCK + torch.minimum(index, last))[:, 0]


def truncate(probabilities: torch.Tensor, sampling: Sequence[SamplingRecipe]) -> torch.Tensor:
    """Set `probabilities` [B, V] outside top-k, then top-p, and min-p to zero, row by row, without rescaling.

    top-p keeps the most probable tokens until their sum reaches p, including the token that reaches it. min-p keeps tokens
    of at least min_p times the largest probability. The most probable token is always kept. Among equally probable tokens,
    which are common in bfloat16, the first are kept. Rows need not sum to 1 and are independent of each other. The whole
    vocabulary is sorted only if the `CANDIDATES` most probable tokens do not reach p.
    """
    vocabulary = probabilities.shape[1]
    total = probabilities.sum(-1, keepdim=True)

    def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype, device=probabilities.device)[:, None]

    ranks = column([s.top_k or vocabulary for s in sampling], torch.int64)
    nuclei = column([s.top_p for s in sampling], torch.float32).to(probabilities.dtype)
    floors = column([s.min_p for s in sampling], torch.float32).to(probabilities.dtype)
    width = min(vocabulary, max(CANDIDATES, *(s.top_k or 0 for s in sampling)))
    only_floor = all(not s.top_k and s.top_p == 1 for s in sampling)
    if only_floor:
        return torch.where(probabilities >= floors * probabilities.amax(-1, keepdim=True), probabilities, 0)
    while True:
        ordered = probabilities.topk(width, sorted=True).values
        ranked = ordered * (torch.arange(width, device=ordered.device)[None] < ranks)
        running = ranked.cumsum(-1)
        in_ranks = torch.where(ranks < vocabulary, running[:, -1:], total)
        # A row is settled if its last candidate lies beyond top-k or top-p.
        settled = (ranks <= width) | (running[:, -1:] >= nuclei * in_ranks)
        if width == vocabulary or bool(settled.all()):
            break
        width = vocabulary
    keep = (ranked > 0) & ((running - ranked < nuclei * in_ranks) | (nuclei == 1)) & (ranked >= floors * ordered[:, :1])
    keep[:, 0] = True
    count = keep.sum(-1, keepdim=True)
    least = ordered.gather(1, count - 1)
    chosen = probabilities >= least
    if bool((chosen.sum(-1, keepdim=True) > count).any()):
        # The order of equal values in `topk` depends on k, so choose the first ones explicitly.
        free = count - (probabilities > least).sum(-1, keepdim=True)
        equal = probabilities == least
        chosen &= ~equal | (equal.cumsum(-1) <= free)
    return torch.where(chosen, probabilities, 0)
