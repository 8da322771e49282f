"""Drawing tokens from logits: one uniform number per token, by inversion of the cumulative distribution."""

from collections.abc import Sequence
from typing import Any

import torch

from posttrain.recipe.rollout import SamplingRecipe

BLOCK = 256
"""Tokens whose probabilities are summed before the one among them is looked for."""
CANDIDATES = 512
"""Most probable tokens among which top-p is looked for first."""


def sample(
    logits: torch.Tensor, sampling: Sequence[SamplingRecipe], draws: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B] int64 and their log-probabilities [B] float32 for logits [B, vocabulary] float32, which are used up.

    Row b uses `sampling[b]` and the uniform number `draws[b]` in [0, 1). The log-probability is that of
    softmax(logits / temperature) over the whole vocabulary, before truncation. Non-finite logits are an error of the
    caller's model and raise FloatingPointError.
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
    tokens = _drawn(kept, draws)
    if any(greedy):
        tokens = torch.where(torch.tensor(greedy, device=logits.device), logits.argmax(-1), tokens)
    chosen = logits.gather(1, tokens[:, None])[:, 0] - largest
    return tokens, chosen - total.log()


def _drawn(weights: torch.Tensor, draws: Sequence[float]) -> torch.Tensor:
    """For each row of `weights` [B, V] >= 0 the first token at which their running sum exceeds draw x total: [B].

    The sum over blocks finds the block and the sum within it the token, so one pass over the weights is enough. In
    float64: over 50,000 terms a float32 sum is off by more than the smallest probabilities worth sampling.
    """
    rows, vocabulary = weights.shape
    whole = -(-vocabulary // BLOCK) * BLOCK
    blocks = torch.nn.functional.pad(weights, (0, whole - vocabulary)).view(rows, -1, BLOCK)
    ends = blocks.sum(-1).double().cumsum(-1)
    total = ends[:, -1:]
    points = torch.tensor(list(draws), dtype=torch.float64, device=weights.device)[:, None] * total
    # Rounding must not lift a point to the total, past everything that has any weight.
    points = torch.minimum(points, torch.nextafter(total, torch.zeros_like(total)))
    block = torch.searchsorted(ends, points, right=True)
    before = torch.nn.functional.pad(ends, (1, 0)).gather(1, block)
    inside = blocks[torch.arange(rows, device=weights.device), block[:, 0]].double()
    place = torch.searchsorted(inside.cumsum(-1), points - before, right=True)
    # Nor past the last token of the block that has any: the sum of a block is rounded to float32.
    last = BLOCK - 1 - (inside > 0).flip(-1).int().argmax(-1, keepdim=True)
    return (block * BLOCK + torch.minimum(place, last))[:, 0]


def truncate(probabilities: torch.Tensor, sampling: Sequence[SamplingRecipe]) -> torch.Tensor:
    """`probabilities` [B, V] with all outside top-k, then top-p, and min-p set to zero (not rescaled), row by row.

    top-p keeps the most probable tokens until their sum reaches p, the token that reaches it included; min-p keeps
    tokens of at least min_p times the largest probability. The most probable token always stays; of tokens that are
    equally probable, as many are in bfloat16, the first stay. Rows need not sum to 1, and what is kept of one does not
    depend on the others. The vocabulary is sorted only where top-p reaches further than its most probable part.
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
        # A row is settled where its last candidate is beyond top-k or top-p.
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
        # Which of equal tokens `topk` names first depends on how many it is asked for.
        free = count - (probabilities > least).sum(-1, keepdim=True)
        equal = probabilities == least
        chosen &= ~equal | (equal.cumsum(-1) <= free)
    return torch.where(chosen, probabilities, 0)


SPARE_TOKENS = 8
"""Tokens looked at beyond the length of a stop string, for those that stand for no character of their own."""


class StopStrings:
    """The texts that end an answer once its decoded tokens hold one of them."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.texts = tuple(texts)
        # A stop string of n bytes ends within the last n tokens, each of which stands for one at least.
        self._looked_at = max((len(text.encode()) for text in self.texts), default=0) + SPARE_TOKENS

    def found(self, answer: Sequence[int]) -> bool:
        """Whether the answer, of which all but the last token were looked at before, ends here."""
        if not self.texts:
            return False
        text = self.tokenizer.decode(list(answer[-self._looked_at :]))
        return any(stop in text for stop in self.texts)
