"""What policies minimise: sums of small losses, each over the sampled tokens of a batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from posttrain.losses.batch import TokenBatch, token_weights
from posttrain.losses.kl import kl_loss
from posttrain.losses.policy import nll, policy_loss
from posttrain.losses.preference import PairLogprobs, kto_losses, preference_losses
from posttrain.losses.reward import bradley_terry
from posttrain.losses.value import value_loss
from posttrain.models.forward import TokenScores
from posttrain.models.policy import Policy
from posttrain.models.reward import RewardModel
from posttrain.recipe.loss import KtoLoss, PairLossRecipe, RewardLossRecipe
from posttrain.recipe.model import LearnerRecipe
from posttrain.recipe.stages import RlRecipe
from posttrain.training.batches import Sample
from posttrain.training.updater import Totals, Updater


@dataclass(frozen=True)
class Judgement:
    """What a model makes of P preference rows, in the order in which they first appear among the samples."""

    rows: list[int]
    """`PreferenceSide.row` of each."""
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
            PairLogprobs(
                chosen_logprobs=logps[chosen],
                rejected_logprobs=logps[rejected],
                chosen_length=lengths[chosen],
                rejected_length=lengths[rejected],
                ref_chosen_logprobs=None if references is None else references[chosen],
                ref_rejected_logprobs=None if references is None else references[rejected],
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


class UnpairedObjective(_PerRow):
    """KTO's loss of judged answers; `kl` is the reference point of the optimizer step, a scalar."""

    def __init__(self, loss: KtoLoss, kl: torch.Tensor) -> None:
        self.loss = loss
        self.kl = kl

    def judge(self, output: TokenScores, samples: Sequence[Sample]) -> Judgement:
        logps, _ = stream_sums(output, samples)
        ratios = logps - _reference_sums(samples, logps.device)
        good = torch.tensor([sample.side is not None and sample.side.chosen for sample in samples], device=logps.device)
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
        losses = bradley_terry(output[chosen], output[rejected], margin, self.loss.center_rewards_coefficient)
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
        places.setdefault(sample.side.row, {})[sample.side.chosen] = place
    return list(places), [sides[True] for sides in places.values()], [sides[False] for sides in places.values()]


def stream_sums(output: TokenScores, samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed log-probability [S] and number of trained tokens [S] of each sample."""
    lengths = torch.tensor([sample.sampled_tokens for sample in samples], device=output.logprobs.device)
    owner = torch.repeat_interleave(torch.arange(len(samples), device=lengths.device), lengths)
    sums = torch.zeros(len(samples), device=lengths.device).index_add(0, owner, output.logprobs)
    return sums, lengths


def _reference_sums(samples: Sequence[Sample], device: torch.device) -> torch.Tensor:
    references = [sample.ref_logprobs for sample in samples]
    return torch.tensor([float(r.sum()) for r in references if r is not None], dtype=torch.float32, device=device)


def _row(sample: Sample) -> int:
    assert sample.side is not None
    return sample.side.row


def token_forward(
    policy: Policy, recipe: LearnerRecipe, temperature: float = 1.0, head: torch.nn.Module | None = None
) -> Callable[[Sequence[Sample]], TokenScores]:
    """Scores of the sampled tokens, sample after sample. `temperature`: that of sampling; `head`: as `Policy.score`."""

    def forward(samples: Sequence[Sample]) -> TokenScores:
        ids, sampled = [s.stream.ids for s in samples], [s.stream.sampled for s in samples]
        return policy.score(ids, sampled, temperature, recipe.logits_per_chunk, head)

    return forward


def reward_forward(model: RewardModel) -> Callable[[Sequence[Sample]], torch.Tensor]:
    """Rewards [S] float32, one per sample."""

    def forward(samples: Sequence[Sample]) -> torch.Tensor:
        return model.rewards([s.stream.ids for s in samples], [s.stream.sampled for s in samples])

    return forward


def logprobs(learner: Updater[TokenScores], samples: Sequence[Sample]) -> list[np.ndarray]:
    """Log-probabilities [n] float32 of the sampled tokens of each sample, without gradient."""
    return [own for own, _ in scores(learner, samples)]


def scores(learner: Updater[TokenScores], samples: Sequence[Sample]) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Log-probabilities [n] float32 of the sampled tokens of each sample and the values [n] float32 before them, None
    where no head reads any; without gradient."""
    found: dict[int, tuple[np.ndarray, np.ndarray | None]] = {}
    for group, output in learner.without_gradient(samples):
        ends = np.cumsum([samples[i].sampled_tokens for i in group])[:-1]
        logprobs = np.split(output.logprobs.float().cpu().numpy(), ends)
        values = [None] * len(group) if output.values is None else np.split(output.values.cpu().numpy(), ends)
        found |= dict(zip(group, zip(logprobs, values, strict=True), strict=True))
    return [found[i] for i in range(len(samples))]


def token_batch(samples: Sequence[Sample], weights: Sequence[float], device: torch.device) -> TokenBatch:
    """The sampled tokens of whole streams, flat; `weights[i]` is the normalizer's weight of stream i's tokens."""
    lengths = [s.sampled_tokens for s in samples]

    def flat(parts: Sequence[np.ndarray | None]) -> torch.Tensor | None:
        given = [part for part in parts if part is not None]
        return torch.from_numpy(np.concatenate(given)).float().to(device) if len(given) == len(parts) else None

    rollout_logprobs = flat([s.stream.rollout_logprobs[s.stream.sampled] for s in samples])
    advantages = flat([s.advantages for s in samples])
    assert rollout_logprobs is not None
    assert advantages is not None
    return TokenBatch(
        rollout_logprobs=rollout_logprobs,
        advantages=advantages,
        stream=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device),
        lengths=torch.tensor(lengths, device=device),
        weights=torch.from_numpy(np.repeat(np.array(weights, dtype=np.float32), lengths)).to(device),
        ref_logprobs=flat([s.ref_logprobs for s in samples]),
        old_logprobs=flat([s.old_logprobs for s in samples]),
    )


class PolicyObjective:
    """Policy loss + KL coefficient x KL to the reference (where the recipe puts it in the loss) - entropy bonus."""

    def __init__(self, recipe: RlRecipe, kl_coefficient: float) -> None:
        self.loss = recipe.loss
        self.kl = recipe.kl
        self.kl_coefficient = kl_coefficient if recipe.kl.apply_to == "loss" else 0.0
        self.entropy_coefficient = recipe.entropy_coefficient

    def weigh(self, samples: Sequence[Sample]) -> tuple[list[float], float]:
        return token_weights(self.loss.aggregation, [s.sampled_tokens for s in samples], self.loss.constant)

    def has_signal(self, sample: Sample) -> bool:
        """Tokens without credit add nothing, unless KL or entropy pull at them."""
        return self.kl_coefficient > 0 or self.entropy_coefficient > 0 or bool(np.any(sample.advantages != 0))

    def __call__(
        self, output: TokenScores, samples: Sequence[Sample], weights: Sequence[float]
    ) -> tuple[torch.Tensor, Totals]:
        batch = token_batch(samples, weights, output.logprobs.device)
        loss, metrics = policy_loss(self.loss, output.logprobs, batch)
        weighted, count = float(batch.weights.sum()), float(len(batch.rollout_logprobs))
        metrics["loss/policy"] = (float(loss.detach()), weighted)
        metrics["policy/entropy"] = (float(output.entropies.detach().sum()), count)
        metrics["policy/mismatch"] = (float((output.logprobs.detach() - batch.rollout_logprobs).abs().sum()), count)
        if self.kl_coefficient > 0:
            assert batch.ref_logprobs is not None
            penalty, more = kl_loss(self.kl.estimator, output.logprobs, batch)
            loss = loss + self.kl_coefficient * penalty
            metrics |= more
            metrics["loss/kl"] = (float(penalty.detach()), weighted)
        if self.entropy_coefficient > 0:
            loss = loss - self.entropy_coefficient * (batch.weights * output.entropies).sum()
        return loss, metrics


class MixedObjective:
    """The policy's objective on episodes + coefficient x negative log-likelihood of taught rows, a mean over tokens.

    Source: "PPO-ptx" of Ouyang et al. 2022, arXiv 2203.02155.
    """

    def __init__(self, policy: "PolicyObjective | SharedObjective", coefficient: float) -> None:
        self.policy = policy
        self.ptx = SupervisedObjective()
        self.coefficient = coefficient

    def weigh(self, samples: Sequence[Sample]) -> tuple[list[float], float]:
        """The policy's weights and divisor; a taught token weighs so much that its share comes out after division."""
        own, divisor = self.policy.weigh([s for s in samples if not s.ptx])
        _, tokens = self.ptx.weigh([s for s in samples if s.ptx])
        weights = iter(own)
        return [self.coefficient * divisor / tokens if s.ptx else next(weights) for s in samples], divisor

    def has_signal(self, sample: Sample) -> bool:
        return sample.ptx or self.policy.has_signal(sample)

    def __call__(
        self, output: TokenScores, samples: Sequence[Sample], weights: Sequence[float]
    ) -> tuple[torch.Tensor, Totals]:
        mask = np.repeat([s.ptx for s in samples], [s.sampled_tokens for s in samples])
        loss = output.logprobs.new_zeros(())
        metrics: Totals = {}
        for taught in (False, True):
            chosen = [(s, w) for s, w in zip(samples, weights, strict=True) if s.ptx == taught]
            if chosen:
                places = torch.from_numpy(np.flatnonzero(mask == taught)).to(output.logprobs.device)
                scores = output.at(places)
                objective = self.ptx if taught else self.policy
                part, more = objective(scores, [s for s, _ in chosen], [w for _, w in chosen])
                loss = loss + part
                # The entropy of the policy is that of what it sampled.
                metrics |= {"ptx/loss": (float(-scores.logprobs.detach().sum()), len(places))} if taught else more
        return loss, metrics


class ValueObjective:
    """The value loss, a mean over the sampled tokens of the optimizer step."""

    def __init__(self, clip: float | None) -> None:
        self.clip = clip

    def weigh(self, samples: Sequence[Sample]) -> tuple[list[float], float]:
        return token_weights("token_mean", [s.sampled_tokens for s in samples])

    def has_signal(self, sample: Sample) -> bool:
        return sample.sampled_tokens > 0

    def __call__(
        self, output: torch.Tensor, samples: Sequence[Sample], weights: Sequence[float]
    ) -> tuple[torch.Tensor, Totals]:
        old, returns = (
            torch.from_numpy(np.concatenate([known(part) for part in parts])).to(output.device)
            for parts in ([s.values for s in samples], [s.returns for s in samples])
        )
        losses, clipped = value_loss(output, old, returns, self.clip)
        # Every token weighs 1, so the loss needs no weights.
        loss, count = losses.sum(), float(len(losses))
        metrics = {"critic/loss": (float(loss.detach()), count)}
        return loss, metrics | ({} if self.clip is None else {"critic/clipped": (float(clipped.sum()), count)})


class SharedObjective:
    """The policy's objective + coefficient x the value loss, a mean over the sampled tokens of the optimizer step.

    Both are of one forward pass, whose scores hold values. Source: the joint loss of Schulman et al. 2017, arXiv
    1707.06347, for a network that policy and values share.
    """

    def __init__(self, policy: PolicyObjective, coefficient: float, clip: float | None) -> None:
        self.policy = policy
        self.values = ValueObjective(clip)
        self.coefficient = coefficient
        self._value_weight = 1.0

    def weigh(self, samples: Sequence[Sample]) -> tuple[list[float], float]:
        """The policy's weights and divisor; what a token's value weighs, so that its share comes out after division, is
        the same for all tokens and is kept for the calls that follow."""
        weights, divisor = self.policy.weigh(samples)
        _, tokens = self.values.weigh(samples)
        self._value_weight = self.coefficient * divisor / tokens
        return weights, divisor

    def has_signal(self, sample: Sample) -> bool:
        """Values also learn from tokens without credit."""
        return self.values.has_signal(sample) or self.policy.has_signal(sample)

    def __call__(
        self, output: TokenScores, samples: Sequence[Sample], weights: Sequence[float]
    ) -> tuple[torch.Tensor, Totals]:
        assert output.values is not None
        loss, metrics = self.policy(output, samples, weights)
        error, more = self.values(output.values, samples, weights)
        return loss + self._value_weight * error, metrics | more


class SupervisedObjective:
    """Negative log-likelihood of the trained tokens, a mean over the tokens of the optimizer step."""

    def weigh(self, samples: Sequence[Sample]) -> tuple[list[float], float]:
        return token_weights("token_mean", [s.sampled_tokens for s in samples])

    def has_signal(self, sample: Sample) -> bool:
        return True

    def __call__(
        self, output: TokenScores, samples: Sequence[Sample], weights: Sequence[float]
    ) -> tuple[torch.Tensor, Totals]:
        batch = token_batch(samples, weights, output.logprobs.device)
        loss = nll(output.logprobs, batch)
        count = float(len(batch.rollout_logprobs))
        return loss, {
            "loss/nll": (float(loss.detach()), count),
            "policy/entropy": (float(output.entropies.detach().sum()), count),
        }


def known(part: np.ndarray | None) -> np.ndarray:
    """A number per token that must have been computed by now."""
    assert part is not None
    return part
