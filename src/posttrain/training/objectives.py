"""Objectives: the losses that a learner minimizes, each a weighted sum over the samples of a micro-batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch

from posttrain.episode import Episode, PerToken
from posttrain.losses.kl import kl_loss, kl_metrics
from posttrain.losses.policy import TokenBatch, dft, nll, number, old_logprobs, policy_loss, token_weights
from posttrain.losses.preference import PairLogprobs, kto_losses, preference_losses
from posttrain.losses.reward import bradley_terry, value_loss
from posttrain.models.forward import TokenScores, logits_of, upload
from posttrain.models.packing import RowPart
from posttrain.models.policy import Policy
from posttrain.models.reward import RewardModel
from posttrain.recipe.loss import (
    EntropyRecipe,
    KlRecipe,
    KtoLoss,
    LossRecipe,
    PairLossRecipe,
    RewardLossRecipe,
    SftLossRecipe,
)
from posttrain.recipe.model import LearnerRecipe
from posttrain.training.token_rules import logprobs_before, set_factors
from posttrain.training.updater import (
    Forward,
    Loss,
    Objective,
    Sample,
    Samples,
    Totals,
    Updater,
    by_sample,
    computed,
    per_sample,
    per_token,
)


@dataclass(frozen=True)
class Comparisons:
    """Losses and rewards of P preference rows, in the order in which they first appear among the samples."""

    rows: list[int]
    """`PreferenceSide.row` of each preference row."""
    losses: torch.Tensor
    """[P]."""
    chosen: torch.Tensor
    """[P] detached: reward of the better answer (KTO: of a good answer, else NaN)."""
    rejected: torch.Tensor
    """[P] detached: reward of the worse answer (KTO: of a bad answer, else NaN)."""


class _PerRow(Objective[Any]):
    """A mean over the rows of the optimizer step, weighted by `Sample.weight` and independent of micro-batches."""

    def weigh(self, samples: Samples) -> tuple[list[float], float]:
        return [sample.weight for sample in samples], float(sum(_weights_of_rows(samples).values()) or 1.0)

    def loss_and_totals(self, compared: Comparisons, samples: Samples) -> Loss:
        """Weighted sum of the losses, and metrics of a training batch. Rewards are not weighted."""
        losses = compared.losses * row_weights(compared, samples)
        count = sum(_weights_of_rows(samples).values())
        chosen, rejected = torch.stack([compared.chosen, compared.rejected]).cpu()
        totals: Totals = {"loss/preference": (number(losses.detach().sum()), count)}
        for name, rewards in (("chosen", chosen), ("rejected", rejected)):
            numbers = rewards[~rewards.isnan()]
            totals[f"preference/{name}"] = (float(numbers.sum()), float(len(numbers)))
        both = ~(chosen.isnan() | rejected.isnan())
        margins = (chosen - rejected)[both]
        totals["preference/margin"] = (float(margins.sum()), float(len(margins)))
        totals["preference/accuracy"] = (float(((margins.sign() + 1) / 2).sum()), float(len(margins)))
        return losses.sum(), totals


@dataclass
class PairObjective(_PerRow):
    """Preference loss + `supervised` x mean negative log-likelihood of the chosen answer's tokens."""

    loss: PairLossRecipe
    supervised: float
    shift: float | None = None
    """delta of `bco`, None for other losses."""

    def compare(self, output: TokenScores, samples: Samples) -> Comparisons:
        """Losses without the supervised term."""
        rows, chosen, rejected = pair_places(samples, output.logprobs.device)
        logps, lengths = stream_sums(output, samples)
        references = _reference_sums(samples, logps) if self.loss.needs_reference else None
        before = (None, None) if references is None else (references[chosen], references[rejected])
        sums = PairLogprobs(logps[chosen], logps[rejected], lengths[chosen], lengths[rejected], *before)
        losses = preference_losses(self.loss, sums, self.shift or 0.0)
        return Comparisons(rows, losses.losses, losses.chosen_rewards, losses.rejected_rewards)

    def __call__(self, output: TokenScores, samples: Samples, weights: Sequence[float]) -> Loss:
        compared = self.compare(output, samples)
        logps, lengths = stream_sums(output, samples)
        _, chosen, rejected = pair_places(samples, output.logprobs.device)
        per_token = logps / lengths
        loss, totals = self.loss_and_totals(compared, samples)
        totals |= {
            f"policy/{name}_logprob": (number(per_token[places].detach().sum()), float(len(places)))
            for name, places in (("chosen", chosen), ("rejected", rejected))
        }
        if self.shift is not None:
            totals["preference/shift"] = (self.shift, 1.0)
        if self.supervised:
            nll = -(per_token[chosen] * row_weights(compared, samples)).sum()
            loss = loss + self.supervised * nll
            totals["loss/nll"] = (number(nll), sum(_weights_of_rows(samples).values()))
        return loss, totals


@dataclass
class UnpairedObjective(_PerRow):
    """KTO's loss of answers that are labeled good or bad."""

    loss: KtoLoss
    kl: torch.Tensor
    """The reference point of the optimizer step, a scalar."""
    mismatched: int
    """Number of answers that it is estimated from."""

    def compare(self, output: TokenScores, samples: Samples) -> Comparisons:
        logps, _ = stream_sums(output, samples)
        ratios = logps - _reference_sums(samples, logps)
        good = upload([sample.side is not None and sample.side.chosen for sample in samples], logps.device)
        losses = kto_losses(self.loss, ratios, good, self.kl.to(logps.device))
        rewards, nothing = self.loss.beta * ratios.detach(), torch.full_like(ratios.detach(), torch.nan)
        rows = [sample.side.row for sample in samples if sample.side is not None]
        return Comparisons(rows, losses, torch.where(good, rewards, nothing), torch.where(good, nothing, rewards))

    def __call__(self, output: TokenScores, samples: Samples, weights: Sequence[float]) -> Loss:
        loss, totals = self.loss_and_totals(self.compare(output, samples), samples)
        totals |= {"preference/kl": (number(self.kl), 1.0), "preference/mismatched": (float(self.mismatched), 1.0)}
        return loss, totals


@dataclass
class RewardObjective(_PerRow):
    """Bradley-Terry on the rewards of the two answers."""

    loss: RewardLossRecipe

    def compare(self, output: torch.Tensor, samples: Samples) -> Comparisons:
        rows, chosen, rejected = pair_places(samples, output.device)
        margin = None
        if self.loss.margin:
            margins = {side.row: side.margin for side in (s.side for s in samples) if side is not None and side.chosen}
            margin = upload(torch.tensor([margins[row] for row in rows]), output.device)
        losses = bradley_terry(output[chosen], output[rejected], margin, self.loss.center_rewards_coefficient)
        return Comparisons(rows, losses, output[chosen].detach(), output[rejected].detach())

    def __call__(self, output: torch.Tensor, samples: Samples, weights: Sequence[float]) -> Loss:
        return self.loss_and_totals(self.compare(output, samples), samples)


def pair_places(samples: Samples, device: torch.device) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Rows, and the positions in `samples` of the chosen and the rejected answer of each, [P] int64 on `device`."""
    places: dict[int, dict[bool, int]] = {}
    for place, sample in enumerate(samples):
        assert sample.side is not None
        places.setdefault(sample.side.row, {})[sample.side.chosen] = place
    chosen, rejected = ([sides[which] for sides in places.values()] for which in (True, False))
    return list(places), upload(chosen, device), upload(rejected, device)


def stream_sums(output: TokenScores, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed log-probability [S] and number of trained tokens [S] of each sample."""
    device, counts = output.logprobs.device, [sample.sampled_tokens for sample in samples]
    owner = upload(np.repeat(np.arange(len(samples)), counts), device)
    sums = torch.zeros(len(samples), device=device).index_add(0, owner, output.logprobs)
    return sums, upload(counts, device)


def _reference_sums(samples: Samples, logps: torch.Tensor) -> torch.Tensor:
    """Summed log-probabilities [S] of the reference model; those of the policy, `logps`, where the samples have none."""
    sums = [float(sample.ref_logprobs.sum()) for sample in samples if sample.ref_logprobs is not None]
    return upload(torch.tensor(sums, dtype=torch.float32), logps.device) if sums else logps.detach()


def row_weights(compared: Comparisons, samples: Samples) -> torch.Tensor:
    """Weights [P] float32 of the rows of `compared`."""
    weights = _weights_of_rows(samples)
    return upload(torch.tensor([weights[row] for row in compared.rows], dtype=torch.float32), compared.losses.device)


def _weights_of_rows(samples: Samples) -> dict[int, float]:
    return {sample.side.row: sample.weight for sample in samples if sample.side is not None}


def token_forward(
    policy: Policy, settings: LearnerRecipe, temperature: float = 1.0, head: torch.nn.Module | None = None
) -> Forward[TokenScores]:
    """A forward pass that returns the scores of the sampled tokens, sample after sample.

    Everything about tokens that the policy sampled refers to the distribution that they were drawn from, softmax(logits
    / temperature): ratios, policy gradients, entropies, the KL divergence from a reference model or teacher, and hence
    the scores of those too. The likelihood of written text (rows of `sft`, `dpo` and `ptx`, evaluation) is that of the
    model itself, at temperature 1, because no temperature drew it. `pack` keeps the rows of `ptx` apart from episodes.
    `temperature`: the temperature that the tokens were sampled with. `head`: reads values from the same hidden states,
    as in `Policy.score`."""

    def forward(samples: Samples) -> TokenScores:
        ids, sampled = [s.stream.ids for s in samples], [s.stream.sampled for s in samples]
        warmth = 1.0 if samples[0].ptx else temperature
        experts = [s.stream.experts for s in samples]
        return policy.score(ids, sampled, warmth, settings.logits_per_chunk, head, experts=experts)

    return forward


def energy_forward(policy: Policy, settings: LearnerRecipe, temperature: float) -> Forward[torch.Tensor]:
    """A forward pass without gradient that returns the energies [N] float32 of the sampled tokens, sample after sample.

    The energy of a token is 1 - 2 p + sum of p_v^2 over the vocabulary, p its probability: the squared norm of the
    gradient of its log-probability with respect to the logits. `temperature`: as in `token_forward`.
    """

    def energies(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        parts = [states.new_zeros(0, dtype=torch.float32)]
        for start in range(0, len(targets), settings.logits_per_chunk):
            chunk = slice(start, start + settings.logits_per_chunk)
            probabilities = torch.softmax(logits_of(policy.model, states[chunk]) / (temperature or 1.0), -1)
            sampled_probabilities = probabilities.gather(1, targets[chunk, None])[:, 0]
            parts.append(1 - 2 * sampled_probabilities + probabilities.square().sum(-1))
        return torch.cat(parts)

    def forward(samples: Samples) -> torch.Tensor:
        ids, sampled = [s.stream.ids for s in samples], [s.stream.sampled for s in samples]
        row = policy.pack(ids, sampled, [s.stream.experts for s in samples])
        part = RowPart(row.ids, row.layout, row.predictors, policy.device, row)
        states = policy.compute(part.states, policy.model)
        return part.gather(policy.compute(energies, states, upload(row.targets[part.mine], states.device)))

    return forward


def token_energies(learner: Updater[torch.Tensor], episodes: Sequence[Episode], samples: Samples) -> PerToken:
    """The energy of each sampled token, zero elsewhere: per episode and stream [T] float32.

    `learner` uses the forward pass of `energy_forward`, and `samples` are those of `episodes`.
    """
    return per_token(episodes, per_sample(learner, samples))


def reward_forward(model: RewardModel) -> Forward[torch.Tensor]:
    """Rewards [S] float32, one per sample."""

    def forward(samples: Samples) -> torch.Tensor:
        return model.rewards([s.stream.ids for s in samples], [s.stream.sampled for s in samples])

    return forward


def logprobs(
    learner: Updater[TokenScores], samples: Samples, done: Callable[[int], None] = lambda count: None
) -> list[np.ndarray]:
    """Log-probabilities [n] float32 of the sampled tokens of each sample, without gradient.

    `done` gets the number of finished samples after each micro-batch.
    """
    return [of_sample for of_sample, _, _ in scores(learner, samples, done)]


def scores(
    learner: Updater[TokenScores], samples: Samples, done: Callable[[int], None] = lambda count: None
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """Log-probabilities [n] and entropies [n] float32 of the sampled tokens of each sample, and the values [n] float32
    before them, None without a value head; without gradient. `done` as in `logprobs`."""
    results: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray | None]] = {}
    for group, output in learner.without_gradient(samples):
        chosen = [samples[i] for i in group]
        logprobs, entropies = by_sample(output.logprobs.float(), chosen), by_sample(output.entropies.float(), chosen)
        values = [None] * len(group) if output.values is None else by_sample(output.values, chosen)
        results |= dict(zip(group, zip(logprobs, entropies, values, strict=True), strict=True))
        done(len(results))
    return [results[i] for i in range(len(samples))]


def token_batch(samples: Samples, weights: Sequence[float], device: torch.device) -> TokenBatch:
    """The sampled tokens of whole streams, flat; `weights[i]` is the weight of stream i's tokens."""
    lengths = [s.sampled_tokens for s in samples]
    rollout_logprobs = np.concatenate([s.rollout_logprobs for s in samples])
    return TokenBatch(
        rollout_logprobs=upload(torch.from_numpy(rollout_logprobs).float(), device),
        advantages=upload(torch.from_numpy(np.concatenate([s.advantages for s in samples])).float(), device),
        stream=upload(np.repeat(np.arange(len(lengths)), lengths), device),
        lengths=upload(lengths, device),
        weights=upload(np.repeat(np.array(weights, dtype=np.float32), lengths), device),
        ref_logprobs=_flat([s.ref_logprobs for s in samples], device),
        old_logprobs=_flat([s.old_logprobs for s in samples], device),
        factors=_flat([s.factors for s in samples], device),
    )


def _flat(parts: Sequence[np.ndarray | None], device: torch.device) -> torch.Tensor | None:
    """[N] float32: the arrays of all samples in a row; None unless all samples have one."""
    given = [part for part in parts if part is not None]
    return upload(torch.from_numpy(np.concatenate(given)).float(), device) if len(given) == len(parts) else None


def episode_ids(samples: Samples) -> list[int]:
    """The episode of each sample. A sample without an episode, such as a supervised row, counts as a separate
    episode."""
    return [-1 - i if sample.episode is None else sample.episode for i, sample in enumerate(samples)]


class PolicyObjective:
    """Policy loss + `kl_coefficient` x KL to the reference model (with `kl.apply_to: loss`) - entropy bonus."""

    def __init__(
        self,
        loss: LossRecipe,
        kl: KlRecipe | None = None,
        kl_coefficient: float | None = None,
        entropy: EntropyRecipe | None = None,
        entropy_coefficient: float | None = None,
        old: Literal["learner", "rollout"] = "rollout",
        first_update: bool = False,
        random: np.random.Generator | None = None,
    ) -> None:
        """Create the objective of an update.

        Args:
            kl_coefficient: current value of an adaptive coefficient; default `kl.coefficient`. The samples need
                `ref_logprobs` if it is above 0.
            entropy: the samples need `entropies` if `top_share` is below 1, and `bonus` if `tokens` is not `all`.
            entropy_coefficient: current value of an adaptive coefficient; default `entropy.coefficient`.
            random: draws the tokens of `clip_cov`. All processes need the same generator state.
            old: where old log-probabilities come from. With `learner`, the samples need `old_logprobs`, except in a
                first update.
            first_update: whether this is the step's first update. The current policy then equals the learner's old
                policy, so the ratio is exactly 1 for any precision and any micro-batches.
        """
        self.loss, self.old, self.first_update, self.random = loss, old, first_update, random
        self.kl = kl or KlRecipe()
        coefficient = self.kl.coefficient if kl_coefficient is None else kl_coefficient
        self.kl_coefficient = coefficient if self.kl.apply_to == "loss" else 0.0
        self.entropy = entropy or EntropyRecipe()
        self.entropy_coefficient = self.entropy.coefficient if entropy_coefficient is None else entropy_coefficient
        self._bonus_scale = 1.0
        """Factor that makes the bonus a mean over the tokens that get it instead of a mean over all tokens."""
        self._update_metrics: Totals = {}
        """Metrics of the whole update, reported with the micro-batch of the sample `_reporter`."""
        self._reporter: Sample | None = None

    def weigh(self, samples: Samples) -> tuple[list[float], float]:
        """One weight per sample, and the divisor. Also sets the values that depend on the whole update: `factors` and
        `held` of the samples, and the scale of the entropy bonus.

        Samples without a baseline and masked ones have weight 0 and no part in the divisor, unless it is constant.
        Samples that were compared and have advantages of 0 keep theirs: their part of the gradient is 0 by the data."""
        masked = [self._is_masked(sample) for sample in samples]
        lengths = [0 if out else s.sampled_tokens for s, out in zip(samples, masked, strict=True)]
        weights, divisor = token_weights(self.loss.aggregation, lengths, self.loss.constant, episode_ids(samples))
        trained = [s for s, out in zip(samples, masked, strict=True) if not out]
        rules = self.loss.type == "gpg" or self.entropy.top_share < 1 or self.entropy.covariance is not None
        self._update_metrics = set_factors(self.loss, self.entropy, samples, trained, self.random) if rules else {}
        if self.loss.mask_truncated:
            truncated = sum(sample.truncated for sample in samples)
            self._update_metrics["policy/truncated_masked"] = (float(truncated), float(len(samples)))
        weights = [0.0 if out else weight for weight, out in zip(weights, masked, strict=True)]
        if self.entropy.tokens != "all":
            whole = sum(weight * s.sampled_tokens for s, weight in zip(samples, weights, strict=True))
            bonus = sum(weight * float(computed(s.bonus).sum()) for s, weight in zip(samples, weights, strict=True))
            self._bonus_scale = whole / bonus if bonus else 0.0
        self._reporter = next(chain(filter(self.has_signal, samples), samples), None)
        return weights, divisor

    def _is_masked(self, sample: Sample) -> bool:
        return not sample.has_baseline or (self.loss.mask_truncated and sample.truncated)

    def has_signal(self, sample: Sample) -> bool:
        """Tokens without credit do not contribute, unless there is a KL penalty or an entropy bonus. With a target
        entropy, all tokens count even while the bonus is off, because the entropy is measured over all of them."""
        if self._is_masked(sample):
            return False
        if self.kl_coefficient > 0 or self.entropy_coefficient > 0 or self.entropy.target is not None:
            return True
        return bool(np.any(sample.advantages != 0)) or (sample.held is not None and bool(sample.held.any()))

    def __call__(self, output: TokenScores, samples: Samples, weights: Sequence[float]) -> Loss:
        batch = token_batch(samples, weights, output.logprobs.device)
        if self.old == "learner" and self.first_update:
            batch = replace(batch, old_logprobs=output.logprobs.detach())
        loss, metrics = policy_loss(self.loss, output.logprobs, batch)
        metrics |= self._update_metrics if any(sample is self._reporter for sample in samples) else {}
        if self.first_update and "policy/clip_low" in metrics:
            low, high = metrics["policy/clip_low"], metrics["policy/clip_high"]
            metrics["policy/clipped_before_update"] = (low[0] + high[0], low[1])
        weighted, count = number(batch.weights.sum()), float(len(batch.rollout_logprobs))
        metrics["loss/policy"] = (number(loss), weighted)
        metrics["policy/entropy"] = (number(output.entropies.detach().sum()), count)
        metrics["policy/mismatch"] = (number((output.logprobs.detach() - batch.rollout_logprobs).abs().sum()), count)
        if batch.ref_logprobs is not None:
            metrics |= kl_metrics(output.logprobs - batch.ref_logprobs)
        if self.kl_coefficient > 0:
            assert batch.ref_logprobs is not None
            penalty = kl_loss(self.kl.estimator_in_use, output.logprobs, batch, self.kl.importance_weighted)
            loss = loss + self.kl_coefficient * penalty
            metrics["loss/kl"] = (number(penalty), weighted)
        if self.entropy.covariance is not None and self.entropy.covariance.type == "kl_cov":
            held = _flat([s.held for s in samples], batch.weights.device)
            if held is not None:
                penalty = (batch.weights * held * (output.logprobs - old_logprobs(batch)).abs()).sum()
                loss = loss + self.entropy.covariance.coefficient * penalty
                metrics["loss/kl_cov"] = (number(penalty), weighted)
        bonus = batch.weights
        if self.entropy.tokens != "all":
            gets = _flat([s.bonus for s in samples], batch.weights.device)
            assert gets is not None
            bonus = self._bonus_scale * batch.weights * gets
            metrics["policy/bonus_entropy"] = (number((gets * output.entropies.detach()).sum()), number(gets.sum()))
        if self.entropy_coefficient > 0:
            loss = loss - self.entropy_coefficient * (bonus * output.entropies).sum()
        return loss, metrics


def metrics_without_pass(objective: Objective[TokenScores], samples: Samples) -> Totals:
    """`policy/entropy` and `policy/kl` of the episodes that an update leaves out because they have no gradient.

    Both come from the log-probabilities log p before the step, the learner's if it computed them and otherwise the
    rollout's, so they need no forward pass. The entropy is estimated by -log p of the sampled tokens, which is unbiased
    for tokens that p sampled from the whole vocabulary, and the KL by k3 of log p - log p_ref.
    """
    idle = [s for s in samples if s.sampled_tokens and not objective.has_signal(s)]
    if not idle:
        return {}
    before = np.concatenate([logprobs_before(sample) for sample in idle])
    totals = {"policy/entropy": (float(-before.sum(dtype=np.float64)), float(len(before)))}
    references = [s.ref_logprobs for s in idle if s.ref_logprobs is not None]
    return totals | (kl_metrics(before - np.concatenate(references)) if len(references) == len(idle) else {})


class MixedObjective:
    """The policy's objective on episodes + coefficient x negative log-likelihood of supervised rows, a mean over
    tokens. A micro-batch contains either episodes or rows.

    Source: "PPO-ptx" of Ouyang et al. 2022, arXiv 2203.02155.
    """

    def __init__(self, policy: "PolicyObjective | SharedObjective", coefficient: float) -> None:
        self.policy = policy
        self.ptx = SupervisedObjective()
        self.coefficient = coefficient

    def weigh(self, samples: Samples) -> tuple[list[float], float]:
        """The policy's weights and divisor. Weights of supervised tokens are scaled so that, after the division, the
        rows contribute coefficient x mean."""
        policy_weights, divisor = self.policy.weigh([s for s in samples if not s.ptx])
        _, tokens = self.ptx.weigh([s for s in samples if s.ptx])
        weights = iter(policy_weights)
        return [self.coefficient * divisor / tokens if s.ptx else next(weights) for s in samples], divisor

    def has_signal(self, sample: Sample) -> bool:
        return sample.ptx or self.policy.has_signal(sample)

    def __call__(self, output: TokenScores, samples: Samples, weights: Sequence[float]) -> Loss:
        if not samples[0].ptx:
            return self.policy(output, samples, weights)
        loss, _ = self.ptx(output, samples, weights)
        if output.values is not None:
            loss = loss + 0 * output.values.sum()  # processes add up their gradients, so each needs one of the head
        # The policy's entropy is measured only at tokens that it sampled.
        return loss, {"ptx/loss": (number(-output.logprobs.detach().sum()), float(len(output.logprobs)))}


@dataclass
class ValueObjective:
    """The value loss, a mean over the sampled tokens of the optimizer step."""

    clip: float | None

    def weigh(self, samples: Samples) -> tuple[list[float], float]:
        return token_weights("token_mean", [s.sampled_tokens for s in samples])

    def has_signal(self, sample: Sample) -> bool:
        return sample.sampled_tokens > 0

    def __call__(self, output: torch.Tensor, samples: Samples, weights: Sequence[float]) -> Loss:
        old, returns = (
            upload(np.concatenate([computed(numbers) for numbers in parts]), output.device)
            for parts in ([s.values for s in samples], [s.returns for s in samples])
        )
        losses, clipped = value_loss(output, old, returns, self.clip)
        # Every token has weight 1, so the loss needs no weights.
        loss, count = losses.sum(), float(len(losses))
        metrics = {"critic/loss": (number(loss), count)}
        return loss, metrics | ({} if self.clip is None else {"critic/clipped": (number(clipped.sum()), count)})


class SharedObjective:
    """The policy's objective + coefficient x the value loss, a mean over the sampled tokens of the optimizer step.

    Both come from one forward pass, whose scores contain values. Source: the joint loss of Schulman et al. 2017, arXiv
    1707.06347, for a network that computes both policy and values.
    """

    def __init__(self, policy: PolicyObjective, coefficient: float, clip: float | None) -> None:
        self.policy = policy
        self.values = ValueObjective(clip)
        self.coefficient = coefficient
        self._value_weight = 1.0

    def weigh(self, samples: Samples) -> tuple[list[float], float]:
        """The policy's weights and divisor. Also computes the weight of the values for the following calls, so that,
        after the division, they contribute coefficient x mean."""
        weights, divisor = self.policy.weigh(samples)
        _, tokens = self.values.weigh(samples)
        self._value_weight = self.coefficient * divisor / tokens
        return weights, divisor

    def has_signal(self, sample: Sample) -> bool:
        """Always true: values are also trained on tokens without credit."""
        return self.values.has_signal(sample) or self.policy.has_signal(sample)

    def __call__(self, output: TokenScores, samples: Samples, weights: Sequence[float]) -> Loss:
        assert output.values is not None
        loss, metrics = self.policy(output, samples, weights)
        error, more = self.values(output.values, samples, weights)
        return loss + self._value_weight * error, metrics | more


class SupervisedObjective(Objective[TokenScores]):
    """The supervised loss of the trained tokens, a mean over the tokens of the optimizer step weighted by
    `Sample.weight`."""

    def __init__(self, loss: SftLossRecipe | None = None) -> None:
        """Default: negative log-likelihood."""
        self.loss = loss or SftLossRecipe()

    def weigh(self, samples: Samples) -> tuple[list[float], float]:
        return [s.weight for s in samples], sum(s.weight * s.sampled_tokens for s in samples) or 1.0

    def __call__(self, output: TokenScores, samples: Samples, weights: Sequence[float]) -> Loss:
        batch = token_batch(samples, weights, output.logprobs.device)
        likelihood = nll(output.logprobs, batch)
        count = sum(weight * s.sampled_tokens for weight, s in zip(weights, samples, strict=True))
        metrics = {
            "loss/nll": (number(likelihood), count),
            "policy/entropy": (number((batch.weights * output.entropies.detach()).sum()), count),
        }
        if self.loss.type == "nll":
            return likelihood, metrics
        return (loss := dft(output.logprobs, batch)), metrics | {"loss/dft": (number(loss), count)}
