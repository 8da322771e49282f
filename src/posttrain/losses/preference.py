"""Preference losses: one value per pair or per answer. The learner divides their sum once per optimizer step.

Notation: y is an answer of |y| tokens to a prompt, log pi(y) its summed log-probability in nats, and
h(y) = log pi(y) - log pi_ref(y) its log-ratio to the reference; c is the chosen answer and r the rejected one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from posttrain.recipe.loss import (
    ApoDownLoss,
    ApoZeroLoss,
    BcoLoss,
    CdpoLoss,
    DpoLoss,
    IpoLoss,
    KtoLoss,
    OrpoLoss,
    PairLossRecipe,
    SimpoLoss,
)

CERTAIN = -1e-6
"""Largest mean log-probability for which odds are computed, so that they stay finite. Larger values are clamped to
it."""


@dataclass(frozen=True)
class PairLogprobs:
    """Summed log-probabilities of the answers of P pairs, without prompt tokens."""

    chosen_logprobs: torch.Tensor
    """[P] float, differentiable: log pi(c), summed over tokens, in nats."""
    rejected_logprobs: torch.Tensor
    """[P] float, differentiable: log pi(r)."""
    chosen_length: torch.Tensor
    """[P] int64: tokens of the chosen answer; 0 counts as 1."""
    rejected_length: torch.Tensor
    """[P] int64: tokens of the rejected answer; 0 counts as 1."""
    ref_chosen_logprobs: torch.Tensor | None = None
    """[P] float: log pi_ref(c); None for losses without a reference."""
    ref_rejected_logprobs: torch.Tensor | None = None
    """[P] float: log pi_ref(r)."""

    def log_ratios(self) -> tuple[torch.Tensor, torch.Tensor]:
        """h(c) and h(r), each [P]. ValueError if the reference's log-probabilities are missing."""
        if self.ref_chosen_logprobs is None or self.ref_rejected_logprobs is None:
            raise ValueError("this loss needs the reference model's log-probabilities of both answers")
        return self.chosen_logprobs - self.ref_chosen_logprobs, self.rejected_logprobs - self.ref_rejected_logprobs

    def per_token(self, chosen: torch.Tensor, rejected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums over each answer's tokens, divided by its length: each [P]."""
        return chosen / self.chosen_length.clamp(min=1), rejected / self.rejected_length.clamp(min=1)


@dataclass(frozen=True)
class PairLosses:
    """Losses and implicit rewards of P pairs."""

    losses: torch.Tensor
    """[P] float, differentiable, not reduced."""
    chosen_rewards: torch.Tensor
    """[P] float, detached: implicit reward of the chosen answer; accuracy compares it with the rejected one."""
    rejected_rewards: torch.Tensor
    """[P] float, detached: implicit reward of the rejected answer."""


def preference_losses(recipe: PairLossRecipe, sums: PairLogprobs, shift: float = 0.0) -> PairLosses:
    """The loss of each pair. ValueError if the recipe needs a reference and `sums` has none.

    `shift`: from `RewardShift`, for `bco`.
    """
    return _LOSSES[recipe.type](recipe, sums, shift)


def dpo(recipe: DpoLoss | CdpoLoss, sums: PairLogprobs, shift: float = 0.0) -> PairLosses:
    """L = -(1 - s) log sigmoid(z) - s log sigmoid(-z), z = beta (h(c) - h(r)), s = label_smoothing; reward beta h(y).

    Sources: Rafailov et al. 2023, "Direct preference optimization", arXiv 2305.18290, equation 7 (s = 0); with s > 0,
    the conservative loss of Mitchell 2023, "A note on DPO with noisy preferences & relationship to IPO". For s > 0 its
    minimum is at z = log((1 - s) / s) instead of infinity.
    """
    chosen, rejected = sums.log_ratios()
    z = recipe.beta * (chosen - rejected)
    smoothing = recipe.label_smoothing
    losses = -(1 - smoothing) * F.logsigmoid(z) - smoothing * F.logsigmoid(-z)
    return _with_rewards(losses, recipe.beta, chosen, rejected)


def ipo(recipe: IpoLoss, sums: PairLogprobs, shift: float = 0.0) -> PairLosses:
    """L = (h(c) / |c| - h(r) / |r| - 1 / (2 beta))^2; reward beta h(y) / |y|.

    Source: Azar et al. 2023, "A general theoretical paradigm to understand learning from human preferences", arXiv
    2310.12036, equation 17, with beta for its tau. The paper does not say whether log-ratios are summed or averaged
    over tokens. Here they are *averaged*, as in the authors' own runs and in TRL: with sums, the fixed target would
    require a smaller change per token of a longer answer.
    """
    chosen, rejected = sums.per_token(*sums.log_ratios())
    return _with_rewards((chosen - rejected - 1 / (2 * recipe.beta)) ** 2, recipe.beta, chosen, rejected)


def simpo(recipe: SimpoLoss, sums: PairLogprobs, shift: float = 0.0) -> PairLosses:
    """L = -log sigmoid(beta log pi(c) / |c| - beta log pi(r) / |r| - gamma); reward beta log pi(y) / |y|.

    Source: Meng et al. 2024, "SimPO", arXiv 2405.14734, equations 4 and 6. Gamma is subtracted after beta; if
    the authors quote a ratio gamma / beta, multiply it by beta.
    """
    chosen, rejected = sums.per_token(sums.chosen_logprobs, sums.rejected_logprobs)
    losses = -F.logsigmoid(recipe.beta * (chosen - rejected) - recipe.gamma)
    return _with_rewards(losses, recipe.beta, chosen, rejected)


def orpo(recipe: OrpoLoss, sums: PairLogprobs, shift: float = 0.0) -> PairLosses:
    """L = -m(c) - beta log sigmoid(log odds(c) - log odds(r)), m(y) = log pi(y) / |y|, odds(y) = p / (1 - p), p =
    e^m(y).

    The first term is the negative log-likelihood of chosen, a mean over the answer's tokens. Reward beta m(y), which
    orders two answers as their odds do. Source: Hong et al. 2024, "ORPO", arXiv 2403.07691, equations 3, 4, 6 and 7,
    with beta for its lambda. Odds are those of m clamped to at most -1e-6.
    """
    chosen, rejected = sums.per_token(sums.chosen_logprobs, sums.rejected_logprobs)
    losses = -chosen - recipe.beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    return _with_rewards(losses, recipe.beta, chosen, rejected)


def apo_zero(recipe: ApoZeroLoss, sums: PairLogprobs, shift: float = 0.0) -> PairLosses:
    """L = (1 - sigmoid(beta h(c))) + sigmoid(beta h(r)); reward beta h(y).

    Raises c and lowers r, each with its largest gradient at the reference's log-probability, unlike `dpo`, which moves
    only their difference. Source: D'Oosterlinck et al. 2024, "Anchored preference optimization and contrastive
    revisions", arXiv 2408.06266, equation 7, plus 1 as in TRL, so that the loss is not negative.
    """
    chosen, rejected = sums.log_ratios()
    # sigmoid(-x) equals 1 - sigmoid(x) without cancellation.
    losses = torch.sigmoid(-recipe.beta * chosen) + torch.sigmoid(recipe.beta * rejected)
    return _with_rewards(losses, recipe.beta, chosen, rejected)


def apo_down(recipe: ApoDownLoss, sums: PairLogprobs, shift: float = 0.0) -> PairLosses:
    """L = sigmoid(beta h(c)) + (1 - sigmoid(beta (h(c) - h(r)))); reward beta h(y).

    Lowers c, and r more. Source: as for `apo_zero`, equation 8, plus 1.
    """
    chosen, rejected = sums.log_ratios()
    losses = torch.sigmoid(recipe.beta * chosen) + torch.sigmoid(-recipe.beta * (chosen - rejected))
    return _with_rewards(losses, recipe.beta, chosen, rejected)


def bco(recipe: BcoLoss, sums: PairLogprobs, shift: float = 0.0) -> PairLosses:
    """L = -log sigmoid(beta h(c) - delta) - log sigmoid(-(beta h(r) - delta)), delta = `shift`; reward beta h(y).

    The loss of a classifier of single answers; it is an upper bound of the loss of `dpo`, which delta tightens. Source:
    Jung et al. 2024, "Binary classifier optimization for large language model alignment", arXiv 2404.04656. TRL's
    `bco_pair` is this with a delta of 0.
    """
    chosen, rejected = sums.log_ratios()
    losses = -F.logsigmoid(recipe.beta * chosen - shift) - F.logsigmoid(shift - recipe.beta * rejected)
    return _with_rewards(losses, recipe.beta, chosen, rejected)


_LOSSES: dict[str, Callable[[Any, PairLogprobs, float], PairLosses]] = {
    **{loss.__name__: loss for loss in (dpo, ipo, simpo, orpo, apo_zero, apo_down, bco)},
    "cdpo": dpo,
}
"""`loss.type` -> the loss of a pair; `shift` is that of `bco` and unused by the others."""


class RewardShift:
    """delta of `bco`: the mean of the mean implicit rewards of chosen and rejected answers, over earlier updates.

    The paper uses (E[reward of c] + E[reward of r]) / 2 under the current policy. Here it is the mean over all earlier
    updates of the run, so it is known before the micro-batches of an update and costs no forward pass. Before the first
    update, where the policy equals its reference, it is 0.
    """

    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0.0

    @property
    def value(self) -> float:
        """delta, in units of reward; 0 before the first update."""
        return self._sum / self._count if self._count else 0.0

    def update(self, totals: Mapping[str, tuple[float, float]]) -> None:
        """Include the metrics `preference/chosen` and `preference/rejected` of an update, each (sum, count)."""
        for name in ("preference/chosen", "preference/rejected"):
            total, count = totals.get(name, (0.0, 0.0))
            self._sum += total
            self._count += count

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self._sum, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sum, self._count = state["sum"], state["count"]


def kto_losses(recipe: KtoLoss, logratio: torch.Tensor, desirable: torch.Tensor, kl: torch.Tensor) -> torch.Tensor:
    """L = w_D (1 - sigmoid(beta (h - kl))) if desirable, else w_U (1 - sigmoid(beta (kl - h))): [N], one per answer.

    `logratio` [N] float, differentiable: h of each answer, in nats; `desirable` [N] bool; `kl`: a scalar from `kto_kl`.
    w_D and w_U are the recipe's desirable and undesirable weights; beta h is the implicit reward. Source: Ethayarajh
    et al. 2024, "KTO: Model alignment as prospect theoretic optimization", arXiv 2402.01306, section 4.1.
    """
    margin = recipe.beta * (logratio - kl)
    # sigmoid(-x) equals 1 - sigmoid(x) without cancellation.
    return torch.where(
        desirable, recipe.desirable_weight * torch.sigmoid(-margin), recipe.undesirable_weight * torch.sigmoid(margin)
    )


def kto_kl(mismatched_logratios: torch.Tensor) -> torch.Tensor:
    """max(0, mean of h) over answers paired with other prompts: the reference point of KTO, a detached scalar.

    `mismatched_logratios` [N] float, in nats. Returns 0 if N is 0. A biased estimate of KL(pi, pi_ref) over a batch
    that needs no sampling. Source: as for `kto_losses`.
    """
    if not len(mismatched_logratios):
        return mismatched_logratios.new_zeros(())
    return mismatched_logratios.detach().mean().clamp(min=0)


def _log_odds(mean: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) of p = exp(mean), [P]."""
    bounded = mean.clamp(max=CERTAIN)
    return bounded - torch.log(-torch.expm1(bounded))


def _with_rewards(losses: torch.Tensor, beta: float, chosen: torch.Tensor, rejected: torch.Tensor) -> PairLosses:
    return PairLosses(losses, beta * chosen.detach(), beta * rejected.detach())
