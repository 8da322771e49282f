"""What the stages minimise: sums of small losses, each over the sampled tokens of a batch."""

from typing import Literal

import torch

from posttrain.losses.batch import TokenBatch
from posttrain.losses.kl import kl_loss
from posttrain.losses.policy import policy_loss
from posttrain.losses.supervised import nll
from posttrain.models.forward import TokenScores
from posttrain.recipe.stages import RlRecipe
from posttrain.training.learner import Totals


class PolicyObjective:
    """Policy loss + KL coefficient x KL to the reference (where the recipe puts it in the loss) - entropy bonus."""

    def __init__(self, recipe: RlRecipe, kl_coefficient: float) -> None:
        self.loss = recipe.loss
        self.kl = recipe.kl
        self.kl_coefficient = kl_coefficient if recipe.kl.place == "loss" else 0.0
        self.entropy_coefficient = recipe.entropy
        self.normaliser: Literal["token", "sequence", "constant"] = recipe.loss.normaliser
        self.constant = recipe.loss.constant
        self.needs_advantages = self.kl_coefficient == 0 and self.entropy_coefficient == 0

    def __call__(self, scores: TokenScores, batch: TokenBatch) -> tuple[torch.Tensor, Totals]:
        loss, metrics = policy_loss(self.loss, scores.logprobs, batch)
        weighted = float(batch.weights.sum())
        metrics["loss/policy"] = (float(loss.detach()), weighted)
        if self.kl_coefficient > 0:
            assert batch.reference is not None
            penalty, more = kl_loss(self.kl.estimator, scores.logprobs, batch)
            loss = loss + self.kl_coefficient * penalty
            metrics |= more
            metrics["loss/kl"] = (float(penalty.detach()), weighted)
        if self.entropy_coefficient > 0:
            loss = loss - self.entropy_coefficient * (batch.weights * scores.entropies).sum()
        return loss, metrics


class SupervisedObjective:
    """Negative log-likelihood of the sampled tokens, a mean over the tokens of the optimizer step."""

    normaliser: Literal["token"] = "token"
    constant = None
    needs_advantages = False

    def __call__(self, scores: TokenScores, batch: TokenBatch) -> tuple[torch.Tensor, Totals]:
        loss = nll(scores.logprobs, batch)
        return loss, {"loss/nll": (float(loss.detach()), float(len(batch.behaviour)))}
