"""Distillation losses: how far the policy is from a teacher at each sampled token, in nats.

`reverse_kl_losses` needs the teacher's log-probability of the sampled token alone. `generalized_jsd` compares two
distributions: over the whole vocabulary, or over the teacher's most probable tokens and one bin for all others.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from posttrain.losses.policy import LOG_RATIO_LIMIT, TokenBatch

TAIL_FLOOR = math.log(1e-12)
"""Smallest log-probability of the bin of all other tokens. Keeps it finite if the teacher has no probability mass
there."""


@dataclass(frozen=True)
class TeacherScores:
    """A teacher's log-probabilities for n sampled tokens, in nats."""

    logprobs: np.ndarray
    """[n] float32: log-probability of each sampled token."""
    candidates: np.ndarray | None = None
    """[n, k] int32: the k most probable tokens at each position, most probable first. None: not computed, or all
    tokens."""
    distribution: np.ndarray | None = None
    """[n, k + 1] float32: log-probabilities of the candidates and, last, of all other tokens together; [n, V] where
    `candidates` is None. None: not computed."""


def reverse_kl_losses(
    logprobs: torch.Tensor,
    teacher_logprobs: torch.Tensor,
    batch: TokenBatch,
    discount: float = 0.0,
    cap: float | None = None,
) -> torch.Tensor:
    """L_t = -w_t A_t log pi_t, a policy gradient on the reverse KL divergence KL(pi, teacher). Returns [N] in nats.

    A_t = sum over k >= t of discount^(k - t) (log teacher_k - log pi_k), over the sampled tokens of the stream. The
    weight w_t = pi_t / pi_rollout_t, at most `cap`, corrects for updates of the policy since it sampled. Both are
    detached.

    On policy, discount 0 gives the gradient of sum over t of KL(pi, teacher) at the states that were visited, and
    discount 1 that of the divergence of whole sequences; both are unbiased. Sources: Lu and Thinking Machines Lab 2025,
    "On-policy distillation" (discount 0); Gu et al. 2023, "MiniLLM", arXiv 2306.08543 (discount 1).

    Args:
        logprobs: [N], differentiable: log-probabilities of the sampled tokens under the current policy.
        teacher_logprobs: [N]: log-probabilities of the sampled tokens under the teacher.
        cap: largest weight; None for no limit.
    """
    current = logprobs.detach()
    advantages = teacher_logprobs - current
    if discount:
        advantages = _discounted_sums(advantages, batch.lengths, discount)
    highest = LOG_RATIO_LIMIT if cap is None else min(math.log(cap), LOG_RATIO_LIMIT)
    weights = (current - batch.rollout_logprobs).clamp(-LOG_RATIO_LIMIT, highest).exp()
    return -weights * advantages * logprobs


def _discounted_sums(values: torch.Tensor, lengths: torch.Tensor, discount: float) -> torch.Tensor:
    """[N]: at each token, the sum of its value and those after it in its stream, discounted per token."""
    numbers = values.double().cpu().numpy()
    stream_ends = set(np.cumsum(lengths.cpu().numpy()) - 1)
    sums, running = np.empty_like(numbers), 0.0
    for place in range(len(numbers) - 1, -1, -1):
        running = numbers[place] + (0.0 if place in stream_ends else discount * running)
        sums[place] = running
    return torch.from_numpy(sums).to(values)


def generalized_jsd(logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, beta: float) -> torch.Tensor:
    """Generalized Jensen-Shannon divergence of two distributions over the last dimension; returns their shape without
    it.

    With teacher P, policy Q and mixture M = beta P + (1 - beta) Q:

        beta KL(P, M) + (1 - beta) KL(Q, M)         for 0 < beta < 1
        KL(P, Q), the forward KL                    for beta = 0
        KL(Q, P), the reverse KL                    for beta = 1

    The cases 0 and 1 are the limits of the divergence divided by beta and by 1 - beta; the divergence itself goes to 0
    there. Source: Agarwal et al. 2023, "On-policy distillation of language models: learning from self-generated
    mistakes" (GKD), arXiv 2306.13649, equation 1. The cases 0 and 1 are as in TRL.

    Args:
        logprobs: [..., B], differentiable.
        teacher_logprobs: [..., B], detached.
        beta: in [0, 1].
    """
    if beta == 0:
        return _kl(teacher_logprobs, logprobs)
    if beta == 1:
        return _kl(logprobs, teacher_logprobs)
    mixture = torch.logaddexp(teacher_logprobs + math.log(beta), logprobs + math.log1p(-beta))
    return beta * _kl(teacher_logprobs, mixture) + (1 - beta) * _kl(logprobs, mixture)


def _kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(one, other) over the last dimension, of log-probabilities."""
    return (one.exp() * (one - other)).sum(-1)


def candidate_logprobs(logprobs: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """[n, k + 1]: log-probabilities of k candidate tokens at each position, and of all other tokens together.

    `logprobs` [n, V] are those of the whole vocabulary, differentiable; `candidates` [n, k] int64. A divergence over
    these k + 1 bins is at most that over the vocabulary, by the data-processing inequality, and it is 0 only where the
    policy gives each candidate the teacher's probability. Without the additional bin it would not be a divergence: the
    candidates alone do not add up to 1, and the policy could lower the sum by moving probability away from all of them.
    """
    rest = logprobs.scatter(1, candidates, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([logprobs.gather(1, candidates), rest.clamp(min=TAIL_FLOOR)], 1)
