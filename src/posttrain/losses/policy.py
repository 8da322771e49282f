"""Policy losses: sums over sampled tokens. The learner divides them once per optimizer step.

In this order: the tokens of a micro-batch and their aggregation weights, importance ratios, the correction for rollout
policies that differ from the learner, the losses, and metrics.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from posttrain.errors import RunError
from posttrain.recipe.loss import (
    CispoLoss,
    CorrectionRecipe,
    DppoLoss,
    GmpoLoss,
    GspoLoss,
    LossRecipe,
    PolicyLoss,
    PpoLoss,
    SapoLoss,
)

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before `exp`, which keeps it finite in float32. Beyond that the gradient is zero."""

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
    """[N] float: the learner's own log-probabilities before the step's updates; None takes `rollout_logprobs`."""
    factors: torch.Tensor | None = None
    """[N] float: factor of each token's policy loss, from rules that need the whole update; None means 1."""

    def stream_sums(self, values: torch.Tensor) -> torch.Tensor:
        """[N], differentiable: the sum of `values` [N] over the stream of each token."""
        sums = torch.zeros(len(self.lengths), dtype=values.dtype, device=values.device)
        return sums.index_add(0, self.stream, values)[self.stream]

    def stream_means(self, values: torch.Tensor) -> torch.Tensor:
        """[N], differentiable: the mean of `values` [N] over the stream of each token."""
        return self.stream_sums(values) / self.lengths[self.stream]


Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def token_weights(
    kind: Aggregation,
    lengths: Sequence[int],
    constant: float | None = None,
    episodes: Sequence[int] | None = None,
) -> tuple[list[float], float]:
    """Weight of each stream's tokens, and the divisor of their weighted sum.

    `lengths`: sampled tokens of *all* streams of the optimizer step, including streams that are not computed; 0 for
    streams that are left out, such as those of a group of one with a group baseline.
    `episodes`: number of the episode of each stream; None if every stream is its own episode.

    - `token_mean`: weight 1, divisor sum of lengths (DAPO, arXiv 2503.14476). Biased: the divisor is
      random, and correlates with returns if lengths do.
    - `sequence_mean`: weight 1 / sampled tokens of the episode, in all its streams, divisor number of episodes with
      sampled tokens (GRPO, arXiv 2402.03300). Biased: a token of a short episode has more weight than one of a long episode.
    - `constant`: weight 1, divisor `constant` (Dr. GRPO, arXiv 2503.20783). Unbiased up to that constant.

    ValueError if `constant` is needed and missing. A step without sampled tokens has divisor 1.
    """
    if kind == "sequence_mean":
        owners = range(len(lengths)) if episodes is None else episodes
        totals: dict[int, int] = {}
        for owner, n in zip(owners, lengths, strict=True):
            totals[owner] = totals.get(owner, 0) + n
        weights = [1.0 / totals[owner] if totals[owner] else 0.0 for owner in owners]
        return weights, float(sum(n > 0 for n in totals.values()) or 1)
    if kind == "token_mean":
        return [1.0] * len(lengths), float(sum(lengths) or 1)
    if constant is None:
        raise ValueError("the aggregation `constant` needs its constant")
    return [1.0] * len(lengths), constant


def token_ratio(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """pi / pi_old at each token [N], differentiable; pi_old is `batch.old_logprobs`, or the rollout policy if that is
    None.
    """
    return bounded_exp(logprobs - old_logprobs(batch))


def sequence_ratio(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """exp(mean over the stream's sampled tokens of log pi / pi_old), at each token [N], differentiable.

    Source: Zheng et al. 2025, "Group sequence policy optimization", arXiv 2507.18071.
    """
    return bounded_exp(batch.stream_means(logprobs - old_logprobs(batch)))


def old_logprobs(batch: TokenBatch) -> torch.Tensor:
    """[N]: log pi_old, the denominator of the ratio."""
    return batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of a log-ratio clamped to +-20."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def importance_correction(recipe: CorrectionRecipe, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
    """Detached factors [N] = w x m for rollouts whose policy differs from the learner's, with r = pi_old / pi_rollout.

    - w, by `weights`: min(r, cap) for `token`; min(product of r over the stream, cap) for `sequence`; 1 for `none`.
    - m, by `reject`: 1 if low <= x <= high, else 0, with x = r for `token`, the product of r over the stream for
      `sequence`, and the geometric mean of r over the stream for `geometric`. The divisor of the loss is unchanged.

    Without cap and rejection, `sequence` weights are unbiased for advantages of whole streams; `token` weights ignore
    that the rollout policy also chose the preceding tokens. Truncation and rejection bound the variance and add bias.
    Sources: token weights: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training";
    token rejection: Ling team 2025, "Every step evolves" (IcePop), arXiv 2510.18855; sequence and geometric: Liu, Li et
    al. 2025, "When speed kills stability: demystifying RL collapse from the training-inference mismatch".
    ValueError if `batch.old_logprobs` is missing.
    """
    if batch.old_logprobs is None:
        raise ValueError("a correction needs the learner's own log-probabilities in `old_logprobs`")
    log_ratios = (batch.old_logprobs - batch.rollout_logprobs).detach()
    by_level = {"token": lambda x: x, "sequence": batch.stream_sums, "geometric": batch.stream_means}
    factors = torch.ones_like(log_ratios)
    metrics = {"correction/mismatch": sum_and_count(log_ratios.abs())}
    if recipe.weights != "none":
        cap = recipe.largest_weight
        assert cap is not None
        ratios = bounded_exp(by_level[recipe.weights](log_ratios))
        factors = ratios.clamp(max=cap)
        metrics["correction/truncated"] = sum_and_count(ratios > cap)
    if (bounds := recipe.kept_ratios) is not None:
        ratios = bounded_exp(by_level[recipe.reject](log_ratios))
        rejected = (ratios < bounds[0]) | (ratios > bounds[1])
        factors = factors.masked_fill(rejected, 0.0)
        metrics["correction/rejected"] = sum_and_count(rejected)
        if recipe.reject != "token":
            streams = torch.zeros_like(batch.lengths).index_add(0, batch.stream, rejected.to(batch.lengths.dtype)) > 0
            metrics["correction/rejected_streams"] = (number(streams.sum()), number((batch.lengths > 0).sum()))
    return factors, metrics | {"correction/weight": sum_and_count(factors)}


def policy_loss(recipe: LossRecipe, logprobs: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
    """sum over tokens of weight x correction x mask x factor x loss of the token: a scalar to minimize, and metrics.

    `logprobs` [N] float, differentiable: log-probabilities of the sampled tokens under the current policy.
    """
    if isinstance(recipe, PpoLoss):
        losses, metrics = ppo(recipe, logprobs, batch)
    elif isinstance(recipe, GspoLoss):
        losses, metrics = gspo(recipe, logprobs, batch)
    elif isinstance(recipe, CispoLoss):
        losses, metrics = cispo(recipe, logprobs, batch)
    elif isinstance(recipe, DppoLoss):
        losses, metrics = dppo(recipe, logprobs, batch)
    elif isinstance(recipe, SapoLoss):
        losses, metrics = sapo(recipe, logprobs, batch)
    elif isinstance(recipe, GmpoLoss):
        losses, metrics = gmpo(recipe, logprobs, batch)
    elif recipe.function is not None:
        losses, metrics = registered_loss(recipe, logprobs, batch)
    else:
        losses, metrics = reinforce(logprobs, batch), {}
    weights = batch.weights
    if recipe.correction is not None:
        corrections, correction_metrics = importance_correction(recipe.correction, batch)
        weights = weights * corrections
        metrics |= correction_metrics
    if recipe.off_policy_mask is not None:
        masked = off_policy_mask(recipe.off_policy_mask, logprobs, batch)
        weights = weights * ~masked
        metrics["policy/off_policy_masked"] = sum_and_count(masked)
    if batch.factors is not None:
        weights = weights * batch.factors
    return (weights * losses).sum(), metrics | divergence_metrics(logprobs, batch)


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


def dppo(recipe: DppoLoss, logprobs: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
    """L_t = -M rho A, rho = pi / mu with the sampling policy mu at the token. Returns [N].

    M = 0 if the token moves further from mu and is already beyond delta: A > 0, pi > mu, D > delta, or A < 0, pi <
    mu, D > delta; else 1. `tv`: D = |pi - mu|, the total variation of the Bernoulli distribution of this token against
    all others. `kl`: D = KL(mu, pi) of the same. A bound on the ratio limits the change of rare tokens far more tightly
    than that of frequent ones; D limits both equally. On policy its gradient is that of REINFORCE. Clamping of the
    log-ratio at +-20 is the only bound on rho. Source: Qi et al. 2026, "Rethinking the trust region in LLM
    reinforcement learning", arXiv 2602.04879.
    """
    ratios = bounded_exp(logprobs - batch.rollout_logprobs)
    now, sampled = logprobs.detach().exp(), batch.rollout_logprobs.exp()
    if recipe.divergence == "tv":
        divergence = (now - sampled).abs()
    else:
        divergence = _bernoulli_kl(batch.rollout_logprobs, logprobs.detach())
    beyond = divergence > recipe.delta
    grown, shrunk = beyond & (now > sampled), beyond & (now < sampled)
    masked_high, masked_low = grown & (batch.advantages > 0), shrunk & (batch.advantages < 0)
    losses = torch.where(masked_high | masked_low, 0.0, -ratios * batch.advantages)
    return losses, {
        "policy/clip_low": sum_and_count(masked_low),
        "policy/clip_high": sum_and_count(masked_high),
        "policy/divergence": sum_and_count(divergence),
    }


def _bernoulli_kl(sampled: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """KL in nats of the Bernoulli distributions of this token against any other, from log-probabilities [N]. Zero where
    both are certain.
    """
    certain = -torch.finfo(sampled.dtype).eps
    others = [torch.log(-torch.expm1(logprobs.clamp(max=certain))) for logprobs in (sampled, now)]
    return sampled.exp() * (sampled - now) - torch.expm1(sampled) * (others[0] - others[1])


def sapo(recipe: SapoLoss, logprobs: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
    """L_t = -(4 / tau) sigmoid(tau (rho - 1)) A, rho = pi / pi_old, tau = tau_pos for A > 0, else tau_neg. Returns [N].

    Its gradient is -w rho A grad log pi with w = 4 p (1 - p), p = sigmoid(tau (rho - 1)): 1 at rho = 1, so on policy it
    is that of REINFORCE, and it fades to 0 on both sides. The metric `policy/gate` is the mean of w.
    Source: Gao et al. 2025, "Soft adaptive policy optimization", arXiv 2511.20347.
    """
    ratios = token_ratio(logprobs, batch)
    positive = batch.advantages > 0
    temperatures = torch.where(positive, recipe.positive_temperature, recipe.negative_temperature).to(ratios.dtype)
    gates = torch.sigmoid(temperatures * (ratios - 1))
    weights = 4 * gates * (1 - gates)
    return -4 / temperatures * gates * batch.advantages, {"policy/gate": sum_and_count(weights)}


def gmpo(recipe: GmpoLoss, logprobs: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
    """L_t = -A exp(mean over the stream of l), with l = min(d, c) for A > 0 and max(d, c) for A < 0. Returns [N].

    d = log pi / pi_old at the token and c = clamp(d, -low, high). For one advantage per stream, the mean of L_t over
    the stream is minus the geometric mean over tokens of the clipped |rho A|, with the sign of A. As in GSPO, every
    token is weighted by the stream's mean advantage, but here each token loses its gradient at its own bound.
    Source: Zhao et al. 2025, "Geometric-mean policy optimization", arXiv 2507.20673.
    """
    difference = (logprobs - old_logprobs(batch)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    bounded = difference.clamp(-recipe.clip_low, recipe.clip_high)
    positive = batch.advantages > 0
    clipped = torch.where(positive, torch.minimum(difference, bounded), torch.maximum(difference, bounded))
    return -batch.advantages * batch.stream_means(clipped).exp(), {
        "policy/clip_low": sum_and_count((difference < -recipe.clip_low) & (batch.advantages < 0)),
        "policy/clip_high": sum_and_count((difference > recipe.clip_high) & positive),
    }


def gpg_factor(groups: Sequence[int], signal: Sequence[bool]) -> float:
    """B / (B - M) for the B streams of an update that have a baseline, of which M are in groups whose advantages are all
    0; 1 if B = M.

    `groups` [B]: the group of each stream. `signal` [B]: whether the stream has an advantage other than 0. GPG
    multiplies the loss of REINFORCE by it, so that groups whose episodes all have the same reward do not shrink the
    gradient.
    Source: Chu et al. 2025, "GPG: group policy gradient", arXiv 2504.02546.
    """
    alive = {group for group, has_signal in zip(groups, signal, strict=True) if has_signal}
    counted = sum(group in alive for group in groups)
    return len(groups) / counted if counted else 1.0


def off_policy_mask(delta: float, logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """[N] bool: tokens with A < 0 in streams whose mean log mu / pi over their tokens exceeds `delta`, in nats.

    mu is the sampling policy as computed by the engine, so the distance includes stale weights and the numerical
    difference between engine and learner. Source: DeepSeek-AI 2025, "DeepSeek-V3.2", arXiv 2512.02556, equation 9; the
    divisor is unchanged.
    """
    distance = batch.stream_means(batch.rollout_logprobs - logprobs.detach())
    return (distance > delta) & (batch.advantages < 0)


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


def dft(logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """sum over tokens of weight x -sg(pi) log pi: a scalar to minimize; `logprobs` [N].

    The gradient of -log pi is that of a policy gradient whose reward is 1 / pi, which is largest for the tokens that
    the model finds least likely. The factor pi removes it: each token has gradient -grad pi.
    Source: Wu et al. 2025, "On the generalization of SFT", arXiv 2508.05629 (dynamic fine-tuning).
    """
    return -(batch.weights * logprobs.detach().exp() * logprobs).sum()


def registered_loss(recipe: PolicyLoss, logprobs: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
    """Losses [N] and metrics of a function registered with `register_loss`. RunError if the losses have another
    shape.
    """
    result = recipe.call(logprobs, batch)
    losses, metrics = result if isinstance(result, tuple) else (result, {})
    if losses.shape != logprobs.shape:
        raise RunError(
            f"loss.type {recipe.type} returned losses of shape {tuple(losses.shape)}; they must be one per sampled token, "
            f"{tuple(logprobs.shape)}"
        )
    return losses, dict(metrics)


def divergence_metrics(logprobs: torch.Tensor, batch: TokenBatch) -> Metrics:
    """Distance of the policy from the rollout policy: mean ratio, and KL(rollout policy, policy) by k1 and k3."""
    log_ratio = (logprobs.detach() - batch.rollout_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {
        "policy/ratio": sum_and_count(log_ratio.exp()),
        "policy/kl_rollout_k1": sum_and_count(-log_ratio),
        "policy/kl_rollout_k3": sum_and_count(log_ratio.expm1() - log_ratio),
    }


def sum_and_count(values: torch.Tensor) -> tuple[float, float]:
    """(sum, count) of a tensor [N]."""
    return number(values.detach().double().sum()), float(values.numel())


def number(scalar: Any) -> Any:
    """`scalar` for a metric: a Python number, or a detached tensor if it is on a GPU.

    Reading a number from a GPU makes the CPU wait for it. The updater reads those of a whole update at once.
    """
    value = scalar.detach() if isinstance(scalar, torch.Tensor) else scalar
    return value if isinstance(value, torch.Tensor) and value.is_cuda else float(value)
