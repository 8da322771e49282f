"""What models compute for the samples of a micro-batch, in the form that learners take."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from posttrain.losses.batch import TokenBatch
from posttrain.models.forward import TokenScores
from posttrain.models.policy import Policy
from posttrain.models.reward import RewardModel
from posttrain.recipe.optimizer import LearnerRecipe
from posttrain.training.batches import Sample
from posttrain.training.learner import Learner


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


def logprobs(learner: Learner[TokenScores], samples: Sequence[Sample]) -> list[np.ndarray]:
    """Log-probabilities [n] float32 of the sampled tokens of each sample, without gradient."""
    return [own for own, _ in scores(learner, samples)]


def scores(learner: Learner[TokenScores], samples: Sequence[Sample]) -> list[tuple[np.ndarray, np.ndarray | None]]:
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
    """The sampled tokens of whole streams, flat; `weights[i]` is the normaliser's weight of stream i's tokens."""
    lengths = [s.sampled_tokens for s in samples]

    def flat(parts: Sequence[np.ndarray | None]) -> torch.Tensor | None:
        given = [part for part in parts if part is not None]
        return torch.from_numpy(np.concatenate(given)).float().to(device) if len(given) == len(parts) else None

    behaviour = flat([s.stream.logprobs[s.stream.sampled] for s in samples])
    advantages = flat([s.advantages for s in samples])
    assert behaviour is not None
    assert advantages is not None
    return TokenBatch(
        behaviour=behaviour,
        advantages=advantages,
        stream=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device),
        lengths=torch.tensor(lengths, device=device),
        weights=torch.from_numpy(np.repeat(np.array(weights, dtype=np.float32), lengths)).to(device),
        reference=flat([s.reference for s in samples]),
        old=flat([s.old for s in samples]),
    )
