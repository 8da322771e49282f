"""Drawing tokens from logits: one uniform number per token, by inversion of the cumulative distribution."""

from collections.abc import Sequence

import torch

from posttrain.recipe.rollout import SamplingRecipe


def sample(
    logits: torch.Tensor, sampling: Sequence[SamplingRecipe], draws: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B] int64 and their log-probabilities [B] float32 for logits [B, vocabulary] float32.

    Row b uses `sampling[b]` and the uniform number `draws[b]` in [0, 1). The log-probability is that of
    softmax(logits / temperature) over the whole vocabulary, before truncation. Non-finite logits are an error of the
    caller's model and raise FloatingPointError.
    """
    temperatures = torch.tensor([s.temperature if s.temperature > 0 else 1.0 for s in sampling], device=logits.device)
    logprobs = torch.log_softmax(logits / temperatures[:, None], dim=-1)
    if not torch.isfinite(logprobs.amax(-1)).all():
        raise FloatingPointError("the model's logits are not finite")
    weights = logprobs.exp()
    for row, recipe in enumerate(sampling):
        if recipe.top_k or recipe.top_p < 1 or recipe.min_p > 0:
            weights[row] = truncate(weights[row], recipe)
    # Float64: over 50,000 terms a float32 sum is off by more than the smallest probabilities worth sampling.
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    points = torch.tensor(list(draws), dtype=torch.float64, device=logits.device) * cumulative[:, -1]
    drawn = torch.searchsorted(cumulative, points[:, None], right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    greedy = torch.tensor([s.temperature == 0 for s in sampling], device=logits.device)
    tokens = torch.where(greedy, logits.argmax(-1), drawn)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def truncate(probabilities: torch.Tensor, recipe: SamplingRecipe) -> torch.Tensor:
    """`probabilities` [vocabulary] with everything outside top-k, then top-p, and min-p set to zero (not rescaled).

    top-p keeps the most probable tokens until their sum reaches p, the token that reaches it included; min-p keeps
    tokens of at least min_p times the largest probability. The most probable token always stays.
    """
    ordered, order = probabilities.sort(descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if recipe.top_k:
        keep[recipe.top_k :] = False
    if recipe.top_p < 1:
        kept = ordered * keep
        keep &= kept.cumsum(0) - kept < recipe.top_p * kept.sum()
    if recipe.min_p > 0:
        keep &= ordered >= recipe.min_p * ordered[0]
    keep[0] = True
    return torch.zeros_like(probabilities).scatter(0, order, ordered * keep)
