"""What preference stages minimise: a loss of each pair of answers, or of each judged answer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from posttrain.losses.preference import PairSums, kto_losses, preference_losses
from posttrain.losses.reward import bradley_terry
from posttrain.models.forward import TokenScores
from posttrain.recipe.preference import KtoLoss, PairLossRecipe, RewardLossRecipe
from posttrain.training.batches import Sample
from posttrain.training.learner import Totals


@dataclass(frozen=True)
class Judgement:
    """What a model makes of P preference rows, in the order in which they first appear among the samples."""

    rows: list[int]
    """`Side.row` of each."""
    losses: torch.Tensor
    """[P]."""
    chosen: torch.Tensor
    """[P] detached: reward of the better answer (of a judged answer: if it is good, else NaN)."""
    rejected: torch.Tensor
    """[P] detached: reward of the worse answer (of a judged answer: if it is bad, else NaN)."""


class _PerRow:
    """A mean over the rows of the optimizer step, whatever its micro-batches."""

    def weigh(self, samples: Sequence[Sample]) -> tuple[list[float], float]:
        return [1.0] * len(samples), float(len({_row(sample) for sample in samples}) or 1)

    def has_signal(self, sample: Sample) -> bool:
        return True

    def totals(self, judged: Judgement) -> Totals:
        """Metrics of a training batch."""
        count = float(len(judged.rows))
        chosen, rejected = judged.chosen, judged.rejected
        found: Totals = {"loss/preference": (float(judged.losses.detach().sum()), count)}
        for name, rewards in (("chosen", chosen), ("rejected", rejected)):
            known = rewards[~rewards.isnan()]
            found[f"preference/{name}"] = (float(known.sum()), float(len(known)))
        both = ~(chosen.isnan() | rejected.isnan())
        margins = (chosen - rejected)[both]
        found["preference/margin"] = (float(margins.sum()), float(len(margins)))
        found["preference/accuracy"] = (float(((margins.sign() + 1) / 2).sum()), float(len(margins)))
        return found


class PairObjective(_PerRow):
    """Preference loss + `supervised` x mean negative log-likelihood of the chosen answer's tokens."""

    def __init__(self, loss: PairLossRecipe, supervised: float) -> None:
        self.loss = loss
        self.supervised = supervised

    def judge(self, output: TokenScores, samples: Sequence[Sample]) -> Judgement:
        """Losses without the supervised term."""
        rows, chosen, rejected = pair_places(samples)
        logps, lengths = stream_sums(output, samples)
        references = _reference_sums(samples, logps.device) if self.loss.needs_reference else None
        found = preference_losses(
            self.loss,
            PairSums(
                chosen=logps[chosen],
                rejected=logps[rejected],
                chosen_length=lengths[chosen],
                rejected_length=lengths[rejected],
                reference_chosen=None if references is None else references[chosen],
                reference_rejected=None if references is None else references[rejected],
            ),
        )
        return Judgement(rows, found.losses, found.chosen_rewards, found.rejected_rewards)

    def __call__(
        self, output: TokenScores, samples: Sequence[Sample], weights: Sequence[float]
    ) -> tuple[torch.Tensor, Totals]:
        judged = self.judge(output, samples)
        logps, lengths = stream_sums(output, samples)
        _, chosen, rejected = pair_places(samples)
        per_token = logps / lengths
        totals = self.totals(judged) | {
            f"policy/{name}_logprob": (float(per_token[places].detach().sum()), float(len(places)))
            for name, places in (("chosen", chosen), ("rejected", rejected))
        }
        loss = judged.losses.sum()
        if self.supervised:
            nll = -per_token[chosen].sum()
            loss = loss + self.supervised * nll
            totals["loss/nll"] = (float(nll.detach()), float(len(chosen)))
        return loss, totals


class VerdictObjective(_PerRow):
    """KTO's loss of judged answers; `kl` is the reference point of the optimizer step, a scalar."""

    def __init__(self, loss: KtoLoss, kl: torch.Tensor) -> None:
        self.loss = loss
        self.kl = kl

    def judge(self, output: TokenScores, samples: Sequence[Sample]) -> Judgement:
        logps, _ = stream_sums(output, samples)
        ratios = logps - _reference_sums(samples, logps.device)
        good = torch.tensor([sample.side is not None and sample.side.good for sample in samples], device=logps.device)
        losses = kto_losses(self.loss, ratios, good, self.kl.to(logps.device))
        rewards, nothing = self.loss.beta * ratios.detach(), torch.full_like(ratios.detach(), torch.nan)
        rows = [_row(sample) for sample in samples]
        return Judgement(rows, losses, torch.where(good, rewards, nothing), torch.where(good, nothing, rewards))

    def __call__(
        self, output: TokenScores, samples: Sequence[Sample], weights: Sequence[float]
    ) -> tuple[torch.Tensor, Totals]:
        judged = self.judge(output, samples)
        return judged.losses.sum(), self.totals(judged) | {"preference/kl": (float(self.kl), 1.0)}


class RewardObjective(_PerRow):
    """Bradley-Terry on the rewards of the two answers."""

    def __init__(self, loss: RewardLossRecipe) -> None:
        self.loss = loss

    def judge(self, output: torch.Tensor, samples: Sequence[Sample]) -> Judgement:
        rows, chosen, rejected = pair_places(samples)
        margin = None
        if self.loss.margin:
            sides = [samples[place].side for place in chosen]
            margin = torch.tensor([side.margin for side in sides if side is not None], device=output.device)
        losses = bradley_terry(output[chosen], output[rejected], margin, self.loss.centring)
        return Judgement(rows, losses, output[chosen].detach(), output[rejected].detach())

    def __call__(
        self, output: torch.Tensor, samples: Sequence[Sample], weights: Sequence[float]
    ) -> tuple[torch.Tensor, Totals]:
        judged = self.judge(output, samples)
        return judged.losses.sum(), self.totals(judged)


def pair_places(samples: Sequence[Sample]) -> tuple[list[int], list[int], list[int]]:
    """Rows, and where among `samples` the chosen and the rejected answer of each stand."""
    places: dict[int, dict[bool, int]] = {}
    for place, sample in enumerate(samples):
        assert sample.side is not None
        places.setdefault(sample.side.row, {})[sample.side.good] = place
    return list(places), [sides[True] for sides in places.values()], [sides[False] for sides in places.values()]


def stream_sums(output: TokenScores, samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed log-probability [S] and number of trained tokens [S] of each sample."""
    lengths = torch.tensor([sample.sampled_tokens for sample in samples], device=output.logprobs.device)
    owner = torch.repeat_interleave(torch.arange(len(samples), device=lengths.device), lengths)
    sums = torch.zeros(len(samples), device=lengths.device).index_add(0, owner, output.logprobs)
    return sums, lengths


def _reference_sums(samples: Sequence[Sample], device: torch.device) -> torch.Tensor:
    references = [sample.reference for sample in samples]
    return torch.tensor([float(r.sum()) for r in references if r is not None], dtype=torch.float32, device=device)


def _row(sample: Sample) -> int:
    assert sample.side is not None
    return sample.side.row
