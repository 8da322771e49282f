"""The objective of distillation, and the forward pass that it needs."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from posttrain.losses.distillation import TeacherScores, candidate_logprobs, generalized_jsd, reverse_kl_losses
from posttrain.losses.policy import number, token_weights
from posttrain.models.forward import TokenMetric, TokenScores, upload
from posttrain.models.policy import Policy
from posttrain.recipe.distill import JsdLoss, ReverseKlLoss
from posttrain.recipe.model import LearnerRecipe
from posttrain.training.objectives import episode_ids, token_batch, token_forward
from posttrain.training.updater import Sample, Totals


def distillation_forward(
    policy: Policy, settings: LearnerRecipe, temperature: float, loss: ReverseKlLoss | JsdLoss
) -> Callable[[Sequence[Sample]], TokenScores]:
    """A forward pass that returns the scores of the sampled tokens and, for `jsd`, their divergences from the teacher.

    The divergence is computed beside the output projection, so that the policy's full distributions exist for
    `learner.logits_per_chunk` tokens at a time. Policy and teacher are compared at the sampling `temperature`, also on
    fixed rows, so that all steps minimize one divergence.
    """
    if isinstance(loss, ReverseKlLoss):
        return token_forward(policy, settings, temperature)

    def forward(samples: Sequence[Sample]) -> TokenScores:
        ids, sampled = [s.stream.ids for s in samples], [s.stream.sampled for s in samples]
        measure = divergence(samples, loss.beta, policy.device)
        return policy.score(ids, sampled, temperature, settings.logits_per_chunk, measure=measure)

    return forward


def divergence(samples: Sequence[Sample], beta: float, device: torch.device) -> TokenMetric:
    """The generalized Jensen-Shannon divergence of the policy from the teacher of `samples`, per sampled token."""
    teachers = [teacher_of(sample) for sample in samples]
    distribution = torch.from_numpy(np.concatenate([required(each.distribution) for each in teachers]))
    chosen = [each.candidates for each in teachers if each.candidates is not None]
    candidates = torch.from_numpy(np.concatenate(chosen)).long() if chosen else None

    def measure(logprobs: torch.Tensor, places: slice) -> torch.Tensor:
        target = upload(distribution[places], device)
        if candidates is not None:
            return generalized_jsd(candidate_logprobs(logprobs, upload(candidates[places], device)), target, beta)
        shared = logprobs[:, : target.shape[1]]
        if shared.shape[1] < logprobs.shape[1]:  # without padding, like the teacher's
            shared = torch.log_softmax(shared, dim=1)
        return generalized_jsd(shared, target, beta)

    return measure


class DistillationObjective:
    """A distillation loss, averaged over the sampled tokens of the optimizer step. The samples need `teacher`."""

    def __init__(self, loss: ReverseKlLoss | JsdLoss) -> None:
        self.loss = loss

    def weigh(self, samples: Sequence[Sample]) -> tuple[list[float], float]:
        lengths = [sample.sampled_tokens for sample in samples]
        return token_weights(self.loss.aggregation, lengths, self.loss.constant, episode_ids(samples))

    def has_signal(self, sample: Sample) -> bool:
        return sample.sampled_tokens > 0

    def __call__(
        self, output: TokenScores, samples: Sequence[Sample], weights: Sequence[float]
    ) -> tuple[torch.Tensor, Totals]:
        batch = token_batch(samples, weights, output.logprobs.device)
        teacher = upload(np.concatenate([teacher_of(sample).logprobs for sample in samples]), output.logprobs.device)
        if isinstance(self.loss, ReverseKlLoss):
            losses = reverse_kl_losses(output.logprobs, teacher, batch, self.loss.discount, self.loss.cap)
        else:
            assert output.measured is not None
            losses = output.measured
        loss = (batch.weights * losses).sum()
        logprobs, count = output.logprobs.detach(), float(len(teacher))
        metrics: Totals = {
            "loss/distillation": (number(loss), number(batch.weights.sum())),
            "policy/entropy": (number(output.entropies.detach().sum()), count),
            "teacher/logprob": (number(teacher.sum()), count),
            "teacher/agreement": _agreement(samples),
        }
        if not any(sample.ptx for sample in samples):
            # At tokens that the policy sampled, the mean of log policy - log teacher estimates KL(policy, teacher).
            metrics["teacher/reverse_kl"] = (number((logprobs - teacher).sum()), count)
            metrics["policy/mismatch"] = (number((logprobs - batch.rollout_logprobs).abs().sum()), count)
        return loss, metrics


def _agreement(samples: Sequence[Sample]) -> tuple[float, float]:
    """(trained tokens that are the teacher's most probable token, trained tokens); (0, 0) if the former is unknown."""
    agreed, count = 0, 0
    for sample in samples:
        teacher = teacher_of(sample)
        if teacher.distribution is not None:
            best = teacher.distribution.argmax(1) if teacher.candidates is None else teacher.candidates[:, 0]
            agreed += int((best == sample.stream.ids[sample.stream.sampled]).sum())
            count += sample.sampled_tokens
    return float(agreed), float(count)


def teacher_of(sample: Sample) -> TeacherScores:
    """The teacher's scores of a sample, which an earlier phase of the step must have computed."""
    assert sample.teacher is not None
    return sample.teacher


def required(numbers: np.ndarray | None) -> np.ndarray:
    """`numbers`, which must not be None."""
    assert numbers is not None
    return numbers
