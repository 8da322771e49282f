"""The built-in policy losses: the settings of each, and the loss of a token [N] that it computes.

Importing this module needs no torch, so that recipes can be read without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from posttrain.losses.policy import (
    LOG_RATIO_LIMIT,
    Metrics,
    TokenBatch,
    bounded_exp,
    old_logprobs,
    sequence_ratio,
    sum_and_count,
    token_ratio,
)
from posttrain.recipe.loss import PolicyLoss, register_loss
from posttrain.recipe.metrics import Metric
from posttrain.recipe.needs import Needs, several_updates

if TYPE_CHECKING:
    import torch

CLIPPED = (
    Metric("policy/clip_low", "share of tokens clipped below"),
    Metric("policy/clip_high", "share of tokens clipped above"),
)


LEAVES_ONE = Needs(
    lambda find: several_updates(find) or find("old") == "rollout", "with one update per step the ratio is always 1"
)
"""The need of clip ranges of ratios to old log-probabilities."""


class _StreamLoss(PolicyLoss):
    """Losses whose published form averages over the tokens of an episode first."""

    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "sequence_mean"
    """How token losses are averaged over the optimizer update. `token_mean`: over all sampled tokens. `sequence_mean`: mean per episode, over the tokens of all its streams, then over episodes. `constant`: sum divided by `constant`."""


@register_loss("ppo", metrics=(*CLIPPED, Metric("policy/clip_dual", "share of tokens at the dual clip")))
class PpoLoss(PolicyLoss):
    """Clipped surrogate per token."""

    type: Literal["ppo"] = "ppo"
    """`ppo`: the clipped ratio of each token."""
    clip_low: Annotated[float, LEAVES_ONE] = Field(0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: Annotated[float, LEAVES_ONE] = Field(0.2, gt=0)
    """The ratio is clipped above at 1 + clip_high (clip-higher when larger than clip_low)."""
    dual_clip: Annotated[float | None, LEAVES_ONE] = Field(None, gt=1)
    """Dual clip: lower bound on the surrogate for negative advantages, as a multiple of the advantage. Null: off."""

    def compute(self, logprobs: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
        """L_t = -min(rho A, clip(rho, 1 - low, 1 + high) A), rho = pi / pi_old at the token. Returns [N].

        Clip-higher is high > low. Dual clip c: for A < 0, L_t = min(L_t, -c A), which bounds the loss where rho is
        large. Sources: Schulman et al. 2017, arXiv 1707.06347; clip-higher: Yu et al. 2025, "DAPO", arXiv 2503.14476;
        dual clip: Ye et al. 2019, arXiv 1912.09729. On policy (rho = 1) its gradient is that of REINFORCE.
        """
        ratios = token_ratio(logprobs, batch)
        losses, metrics = _clipped_surrogate(ratios, batch.advantages, self.clip_low, self.clip_high)
        if self.dual_clip is not None:
            bound = -self.dual_clip * batch.advantages
            bounded = (batch.advantages < 0) & (losses > bound)
            losses = bound.where(bounded, losses)
            metrics["policy/clip_dual"] = sum_and_count(bounded)
        return losses, metrics


@register_loss("gspo", "gspo_token", metrics=CLIPPED)
class GspoLoss(_StreamLoss):
    """Clipped surrogate on the geometric mean ratio of a stream."""

    type: Literal["gspo", "gspo_token"]
    """`gspo`: one ratio per stream. `gspo_token`: same values, token-wise gradients for token-wise advantages."""
    clip_low: Annotated[float, LEAVES_ONE] = Field(3e-4, gt=0, lt=1)
    """The stream's ratio is clipped below at 1 - clip_low."""
    clip_high: Annotated[float, LEAVES_ONE] = Field(4e-4, gt=0)
    """The stream's ratio is clipped above at 1 + clip_high."""

    def compute(self, logprobs: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
        """L_t = -min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean over the stream of log pi / pi_old). Returns [N].

        `gspo`: the gradient flows through s, so every token is weighted by the stream's mean advantage. `gspo_token`:
        s_t = sg(s) pi_t / sg(pi_t) has the same value, and each token is weighted by its own advantage.
        Source: Zheng et al. 2025, "Group sequence policy optimization", arXiv 2507.18071.
        """
        ratios = sequence_ratio(logprobs, batch)
        if self.type == "gspo_token":
            ratios = ratios.detach() * (logprobs - logprobs.detach()).exp()
        return _clipped_surrogate(ratios, batch.advantages, self.clip_low, self.clip_high)

    @property
    def averages_advantages(self) -> bool:
        """Whether every token is weighted by the mean advantage of its stream."""
        return self.type == "gspo"

    def warnings(self, recipe: Any) -> list[str]:
        """Clip ranges that are too wide for ratios of streams."""
        if max(self.clip_low, self.clip_high) <= 1e-2:
            return []
        return [
            f"loss.type {self.type} clips the ratio of whole streams, which lies within about 1e-3 of 1; "
            f"clip_low {self.clip_low:g} and clip_high {self.clip_high:g} never clip"
        ]


@register_loss("cispo", metrics=CLIPPED)
class CispoLoss(PolicyLoss):
    """REINFORCE with a clipped, detached importance weight; no token loses its gradient."""

    type: Literal["cispo"] = "cispo"
    """`cispo`: a clipped, detached weight for each token."""
    clip_low: float = Field(1.0, gt=0, le=1)
    """The weight is clipped below at 1 - clip_low (1.0: no lower clip)."""
    clip_high: float = Field(4.0, gt=0)
    """The weight is clipped above at 1 + clip_high."""

    def compute(self, logprobs: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
        """L_t = -sg(clip(rho, 1 - low, 1 + high)) A log pi: clipped tokens keep their gradient. Returns [N].

        Source: MiniMax 2025, "MiniMax-M1", arXiv 2506.13585.
        """
        ratios = token_ratio(logprobs, batch).detach()
        low, high = 1 - self.clip_low, 1 + self.clip_high
        metrics = {"policy/clip_low": sum_and_count(ratios < low), "policy/clip_high": sum_and_count(ratios > high)}
        return -ratios.clamp(low, high) * batch.advantages * logprobs, metrics


@register_loss(
    "dppo", metrics=(*CLIPPED, Metric("policy/divergence", "divergence from the policy that sampled (`dppo`)"))
)
class DppoLoss(PolicyLoss):
    """Importance-weighted policy gradient; tokens whose probability moved too far from the sampling policy are masked."""

    ratio_to: ClassVar[Literal["old", "rollout"] | None] = "rollout"

    type: Literal["dppo"] = "dppo"
    """`dppo`: divergence PPO. Ratio and mask compare with the policy that sampled, not with recomputed log-probabilities."""
    divergence: Literal["tv", "kl"] = "tv"
    """How the change of a token's probability is measured: `tv`: difference of probabilities; `kl`: KL, in nats, of the two events this token and any other."""
    delta: float = Field(0.15, gt=0)
    """Largest divergence of a token that may move further from the sampling policy: a difference of probabilities for `tv`, nats for `kl`. The authors' script in verl takes 0.15 for `tv`, the default here, and 0.05 for `kl`."""

    def _check(self) -> None:
        if self.correction is not None:
            raise ValueError(
                "`type: dppo` takes its ratio to the sampling policy, which includes the difference of engine and learner; "
                "remove `correction`"
            )

    def compute(self, logprobs: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
        """L_t = -M rho A, rho = pi / mu with the sampling policy mu at the token. Returns [N].

        M = 0 if the token moves further from mu and is already beyond delta: A > 0, pi > mu, D > delta, or A < 0, pi <
        mu, D > delta; else 1. `tv`: D = |pi - mu|, the total variation of the Bernoulli distribution of this token
        against all others. `kl`: D = KL(mu, pi) of the same. A bound on the ratio limits the change of rare tokens far
        more tightly than that of frequent ones; D limits both equally. On policy its gradient is that of REINFORCE.
        Clamping of the log-ratio at +-20 is the only bound on rho. Source: Qi et al. 2026, "Rethinking the trust region
        in LLM reinforcement learning", arXiv 2602.04879.
        """
        ratios = bounded_exp(logprobs - batch.rollout_logprobs)
        now, sampled = logprobs.detach().exp(), batch.rollout_logprobs.exp()
        if self.divergence == "tv":
            divergence = (now - sampled).abs()
        else:
            divergence = _bernoulli_kl(batch.rollout_logprobs, logprobs.detach())
        beyond = divergence > self.delta
        grown, shrunk = beyond & (now > sampled), beyond & (now < sampled)
        masked_high, masked_low = grown & (batch.advantages > 0), shrunk & (batch.advantages < 0)
        losses = (-ratios * batch.advantages).masked_fill(masked_high | masked_low, 0.0)
        return losses, {
            "policy/clip_low": sum_and_count(masked_low),
            "policy/clip_high": sum_and_count(masked_high),
            "policy/divergence": sum_and_count(divergence),
        }


@register_loss("sapo", metrics=(Metric("policy/gate", "mean gate of `sapo`"),))
class SapoLoss(_StreamLoss):
    """A smooth gate of the ratio in place of clipping: the weight of a token fades as its ratio leaves 1."""

    type: Literal["sapo"] = "sapo"
    """`sapo`: soft adaptive policy optimization."""
    positive_temperature: float = Field(1.0, gt=0)
    """Sharpness of the gate for tokens with a positive advantage (tau_pos). Larger fades faster."""
    negative_temperature: float = Field(1.05, gt=0)
    """Sharpness of the gate for all other tokens (tau_neg)."""

    def compute(self, logprobs: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
        """L_t = -(4 / tau) sigmoid(tau (rho - 1)) A, rho = pi / pi_old, tau = tau_pos for A > 0, else tau_neg. Returns [N].

        Its gradient is -w rho A grad log pi with w = 4 p (1 - p), p = sigmoid(tau (rho - 1)): 1 at rho = 1, so on
        policy it is that of REINFORCE, and it fades to 0 on both sides. The metric `policy/gate` is the mean of w.
        Source: Gao et al. 2025, "Soft adaptive policy optimization", arXiv 2511.20347.
        """
        ratios = token_ratio(logprobs, batch)
        temperatures = ratios.new_full(ratios.shape, self.negative_temperature)
        temperatures = temperatures.masked_fill(batch.advantages > 0, self.positive_temperature)
        gates = (temperatures * (ratios - 1)).sigmoid()
        weights = 4 * gates * (1 - gates)
        return -4 / temperatures * gates * batch.advantages, {"policy/gate": sum_and_count(weights)}


@register_loss("gmpo", metrics=CLIPPED)
class GmpoLoss(_StreamLoss):
    """The geometric mean over a stream of clipped token ratios."""

    type: Literal["gmpo"] = "gmpo"
    """`gmpo`: geometric-mean policy optimization. Every token gets the mean advantage of its stream."""
    clip_low: float = Field(0.4, gt=0)
    """The log-ratio of a token is clipped below at -clip_low, in nats."""
    clip_high: float = Field(0.4, gt=0)
    """The log-ratio of a token is clipped above at clip_high, in nats."""

    def compute(self, logprobs: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
        """L_t = -A exp(mean over the stream of l), with l = min(d, c) for A > 0 and max(d, c) for A < 0. Returns [N].

        d = log pi / pi_old at the token and c = clamp(d, -low, high). For one advantage per stream, the mean of L_t
        over the stream is minus the geometric mean over tokens of the clipped |rho A|, with the sign of A. As in GSPO,
        every token is weighted by the stream's mean advantage, but here each token loses its gradient at its own bound.
        Source: Zhao et al. 2025, "Geometric-mean policy optimization", arXiv 2507.20673.
        """
        difference = (logprobs - old_logprobs(batch)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        bounded = difference.clamp(-self.clip_low, self.clip_high)
        positive = batch.advantages > 0
        clipped = difference.minimum(bounded).where(positive, difference.maximum(bounded))
        return -batch.advantages * batch.stream_means(clipped).exp(), {
            "policy/clip_low": sum_and_count((difference < -self.clip_low) & (batch.advantages < 0)),
            "policy/clip_high": sum_and_count((difference > self.clip_high) & positive),
        }

    @property
    def averages_advantages(self) -> bool:
        """Whether every token is weighted by the mean advantage of its stream."""
        return True


@register_loss("reinforce", "gpg")
class ReinforceLoss(PolicyLoss):
    """-A log p, without importance weights: exact only for the first update of a step."""

    ratio_to: ClassVar[Literal["old", "rollout"] | None] = None

    type: Literal["reinforce", "gpg"] = "reinforce"
    """`reinforce`: no importance weights. `gpg`: the same, times B / (B - M), where M of the update's B streams are in groups without any advantage."""

    def compute(self, logprobs: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
        """L_t = -A log pi, the exact policy gradient on policy only. Returns [N]. Source: Williams 1992."""
        return -batch.advantages * logprobs, {}

    def problems(self, recipe: Any) -> list[str]:
        """More than one update per step."""
        if recipe.learner.updates_per_step * recipe.learner.epochs_per_step == 1:
            return []
        return [
            f"`loss.type: {self.type}` has no importance weights, so it supports one update per step only; use ppo for more"
        ]


def _clipped_surrogate(
    ratios: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, Metrics]:
    """The clipped surrogate [N], and how many tokens lose their gradient at either bound."""
    clipped = ratios.clamp(1 - low, 1 + high)
    losses = -(ratios * advantages).minimum(clipped * advantages)
    return losses, {
        "policy/clip_low": sum_and_count((ratios < 1 - low) & (advantages < 0)),
        "policy/clip_high": sum_and_count((ratios > 1 + high) & (advantages > 0)),
    }


def _bernoulli_kl(sampled: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """KL in nats of the Bernoulli distributions of this token against any other, from log-probabilities [N]. Zero where
    both are certain."""
    import torch

    certain = -torch.finfo(sampled.dtype).eps
    others = [(-logprobs.clamp(max=certain).expm1()).log() for logprobs in (sampled, now)]
    return sampled.exp() * (sampled - now) - sampled.expm1() * (others[0] - others[1])
