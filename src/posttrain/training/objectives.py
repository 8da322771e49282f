"""What policies minimise: sums of small losses, each over the sampled tokens of a batch."""

from collections.abc import Sequence

import numpy as np
import torch

from posttrain.losses.kl import kl_loss
from posttrain.losses.normalisation import token_weights
from posttrain.losses.policy import policy_loss
from posttrain.losses.supervised import nll
from posttrain.losses.value import value_loss
from posttrain.models.forward import TokenScores
from posttrain.recipe.stages import RlRecipe
from posttrain.training.batches import Sample
from posttrain.training.forward import token_batch
from posttrain.training.learner import Totals


class PolicyObjective:
    """Policy loss + KL coefficient x KL to the reference (where the recipe puts it in the loss) - entropy bonus."""

    def __init__(self, recipe: RlRecipe, kl_coefficient: float) -> None:
        self.loss = recipe.loss
        self.kl = recipe.kl
        self.kl_coefficient = kl_coefficient if recipe.kl.place == "loss" else 0.0
        self.entropy_coefficient = recipe.entropy

    def weigh(self, samples: Sequence[Sample]) -> tuple[list[float], float]:
        return token_weights(self.loss.normaliser, [s.sampled_tokens for s in samples], self.loss.constant)

    def has_signal(self, sample: Sample) -> bool:
        """Tokens without credit add nothing, unless KL or entropy pull at them."""
        return self.kl_coefficient > 0 or self.entropy_coefficient > 0 or bool(np.any(sample.advantages != 0))

    def __call__(
        self, output: TokenScores, samples: Sequence[Sample], weights: Sequence[float]
    ) -> tuple[torch.Tensor, Totals]:
        batch = token_batch(samples, weights, output.logprobs.device)
        loss, metrics = policy_loss(self.loss, output.logprobs, batch)
        weighted, count = float(batch.weights.sum()), float(len(batch.behaviour))
        metrics["loss/policy"] = (float(loss.detach()), weighted)
        metrics["policy/entropy"] = (float(output.entropies.detach().sum()), count)
        metrics["policy/mismatch"] = (float((output.logprobs.detach() - batch.behaviour).abs().sum()), count)
        if self.kl_coefficient > 0:
            assert batch.reference is not None
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
        self.taught = SupervisedObjective()
        self.coefficient = coefficient

    def weigh(self, samples: Sequence[Sample]) -> tuple[list[float], float]:
        """The policy's weights and divisor; a taught token weighs so much that its share comes out after division."""
        own, divisor = self.policy.weigh([s for s in samples if not s.taught])
        _, tokens = self.taught.weigh([s for s in samples if s.taught])
        weights = iter(own)
        return [self.coefficient * divisor / tokens if s.taught else next(weights) for s in samples], divisor

    def has_signal(self, sample: Sample) -> bool:
        return sample.taught or self.policy.has_signal(sample)

    def __call__(
        self, output: TokenScores, samples: Sequence[Sample], weights: Sequence[float]
    ) -> tuple[torch.Tensor, Totals]:
        mask = np.repeat([s.taught for s in samples], [s.sampled_tokens for s in samples])
        loss = output.logprobs.new_zeros(())
        metrics: Totals = {}
        for taught in (False, True):
            chosen = [(s, w) for s, w in zip(samples, weights, strict=True) if s.taught == taught]
            if chosen:
                places = torch.from_numpy(np.flatnonzero(mask == taught)).to(output.logprobs.device)
                scores = output.at(places)
                objective = self.taught if taught else self.policy
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
        return token_weights("token", [s.sampled_tokens for s in samples])

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
        return token_weights("token", [s.sampled_tokens for s in samples])

    def has_signal(self, sample: Sample) -> bool:
        return True

    def __call__(
        self, output: TokenScores, samples: Sequence[Sample], weights: Sequence[float]
    ) -> tuple[torch.Tensor, Totals]:
        batch = token_batch(samples, weights, output.logprobs.device)
        loss = nll(output.logprobs, batch)
        count = float(len(batch.behaviour))
        return loss, {
            "loss/nll": (float(loss.detach()), count),
            "policy/entropy": (float(output.entropies.detach().sum()), count),
        }


def known(part: np.ndarray | None) -> np.ndarray:
    """A number per token that must have been computed by now."""
    assert part is not None
    return part
