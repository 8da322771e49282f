"""Policy losses: sums over sampled tokens. The learner divides them once per optimizer step."""

import torch

from posttrain.errors import RunError
from posttrain.losses.batch import Metrics, TokenBatch
from posttrain.losses.kl import kl_metrics
from posttrain.losses.ratios import (
    divergence_metrics,
    importance_correction,
    sequence_ratio,
    sum_and_count,
    token_ratio,
)
from posttrain.recipe.loss import CispoLoss, GspoLoss, LossRecipe, PolicyLoss, PpoLoss


def policy_loss(recipe: LossRecipe, logprobs: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
    """sum over tokens of weight x correction x loss of the token: a scalar to minimize, and metrics.

    `logprobs` [N] float, differentiable: log-probabilities of the sampled tokens under the current policy.
    """
    if isinstance(recipe, PpoLoss):
        losses, metrics = ppo(recipe, logprobs, batch)
    elif isinstance(recipe, GspoLoss):
        losses, metrics = gspo(recipe, logprobs, batch)
    elif isinstance(recipe, CispoLoss):
        losses, metrics = cispo(recipe, logprobs, batch)
    elif recipe.function is not None:
        losses, metrics = registered_loss(recipe, logprobs, batch)
    else:
        losses, metrics = reinforce(logprobs, batch), {}
    weights = batch.weights
    if recipe.correction is not None:
        corrections, correction_metrics = importance_correction(recipe.correction, batch)
        weights = weights * corrections
        metrics |= correction_metrics
    return (weights * losses).sum(), metrics | divergence_metrics(logprobs, batch) | kl_metrics(logprobs, batch)


def ppo(recipe: PpoLoss, logprobs: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
    """L_t = -min(rho A, clip(rho, 1 - low, 1 + high) A), rho = pi / pi_old at the token. Returns [N].

    Clip-higher is high > low. Dual clip c: for A < 0, L_t = min(L_t, -c A), which bounds the loss where rho is large.
    Sources: Schulman et al. 2017, arXiv 1707.06347; clip-higher: Yu et al. 2025, "DAPO", arXiv 2503.14476; dual clip:
    Ye et al. 2019, arXiv 1912.09729. On policy (rho = 1) its gradient is that of REINFORCE.
    """
    ratios = token_ratio(logprobs, batch)
    losses, metrics = _clipped_surrogate(ratios, batch.advantages, recipe.clip_low, recipe.clip_high)
    if recipe.dual_clip is not None:
        bound = -recipe.dual_clip * batch.advantages
        bounded = (batch.advantages < 0) & (losses > bound)
        losses = torch.where(bounded, bound, losses)
        metrics["policy/clip_dual"] = sum_and_count(bounded)
    return losses, metrics


def gspo(recipe: GspoLoss, logprobs: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
    """L_t = -min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean over the stream of log pi / pi_old). Returns [N].

    `gspo`: the gradient flows through s, so every token is weighted by the stream's mean advantage. `gspo_token`:
    s_t = sg(s) pi_t / sg(pi_t) has the same value, and each token is weighted by its own advantage.
    Source: Zheng et al. 2025, "Group sequence policy optimization", arXiv 2507.18071.
    """
    ratios = sequence_ratio(logprobs, batch)
    if recipe.type == "gspo_token":
        ratios = ratios.detach() * (logprobs - logprobs.detach()).exp()
    return _clipped_surrogate(ratios, batch.advantages, recipe.clip_low, recipe.clip_high)


def cispo(recipe: CispoLoss, logprobs: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
    """L_t = -sg(clip(rho, 1 - low, 1 + high)) A log pi: clipped tokens keep their gradient. Returns [N].

    Source: MiniMax 2025, "MiniMax-M1", arXiv 2506.13585.
    """
    ratios = token_ratio(logprobs, batch).detach()
    low, high = 1 - recipe.clip_low, 1 + recipe.clip_high
    metrics = {"policy/clip_low": sum_and_count(ratios < low), "policy/clip_high": sum_and_count(ratios > high)}
    return -ratios.clamp(low, high) * batch.advantages * logprobs, metrics


def reinforce(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """L_t = -A log pi, the exact policy gradient on policy only. Returns [N]. Source: Williams 1992."""
    return -batch.advantages * logprobs


def _clipped_surrogate(
    ratios: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, Metrics]:
    """The clipped surrogate [N], and how many tokens lose their gradient at either bound."""
    clipped = ratios.clamp(1 - low, 1 + high)
    losses = -torch.minimum(ratios * advantages, clipped * advantages)
    return losses, {
        "policy/clip_low": sum_and_count((ratios < 1 - low) & (advantages < 0)),
        "policy/clip_high": sum_and_count((ratios > 1 + high) & (advantages > 0)),
    }


def nll(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """sum over tokens of weight x -log pi: negative log-likelihood in nats, a scalar to minimize; `logprobs` [N]."""
    return -(batch.weights * logprobs).sum()


def registered_loss(recipe: PolicyLoss, logprobs: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
    """Losses [N] and metrics of a function of `register_loss`. RunError if the losses have another shape."""
    result = recipe.call(logprobs, batch)
    losses, metrics = result if isinstance(result, tuple) else (result, {})
    if losses.shape != logprobs.shape:
        raise RunError(
            f"loss.type {recipe.type} returned losses of shape {tuple(losses.shape)}; they must be one per sampled token, "
            f"{tuple(logprobs.shape)}"
        )
    return losses, dict(metrics)
