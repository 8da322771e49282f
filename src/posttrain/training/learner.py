"""The learner: samples with credit become one optimizer step. It does not know the algorithm.

The loss is divided once, by a normaliser that is global over the optimizer step, so gradients are the same to float
rounding for any split into micro-batches.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import numpy as np
import torch

from posttrain.errors import RunError
from posttrain.losses.batch import TokenBatch
from posttrain.losses.normalisation import token_weights
from posttrain.models.forward import TokenScores
from posttrain.models.policy import Policy
from posttrain.recipe.optimizer import LearnerRecipe
from posttrain.training.batches import Sample, pack
from posttrain.training.optimizer import Optimizer

Totals = dict[str, tuple[float, float]]
"""Metrics as (sum, count), which add up exactly over micro-batches."""


class Objective(Protocol):
    """What a stage minimises, as a sum over the sampled tokens of a micro-batch."""

    @property
    def normaliser(self) -> Literal["token", "sequence", "constant"]:
        """What the loss is divided by."""

    @property
    def constant(self) -> float | None:
        """The divisor of the `constant` normaliser."""

    @property
    def needs_advantages(self) -> bool:
        """Streams whose advantages are all zero add nothing to the gradient and are left out."""

    def __call__(self, scores: TokenScores, batch: TokenBatch) -> tuple[torch.Tensor, Totals]:
        """The weighted sum of token losses (scalar) and metrics."""
        ...


class Learner:
    """Owns the optimizer of a policy."""

    def __init__(self, policy: Policy, optimizer: Optimizer, recipe: LearnerRecipe, temperature: float) -> None:
        """`temperature`: that of sampling; log-probabilities are those of the tempered policy."""
        self.policy = policy
        self.optimizer = optimizer
        self.recipe = recipe
        self.temperature = temperature
        self.skipped_in_a_row = 0
        self.trained_tokens = 0
        self._messages: list[str] = []

    def update(self, samples: Sequence[Sample], objective: Objective) -> Totals:
        """One optimizer step on `samples`. A loss or gradient that is not finite skips it and names the episodes."""
        weights, divisor = token_weights(objective.normaliser, [s.sampled_tokens for s in samples], objective.constant)
        signal = [i for i, s in enumerate(samples) if not objective.needs_advantages or np.any(s.advantages != 0)]
        totals: Totals = {}
        if not signal:
            return {"optimizer/skipped": (0.0, 1.0), "optimizer/no_signal": (1.0, 1.0)}
        for group in self._groups([samples[i] for i in signal]):
            chosen = [samples[signal[i]] for i in group]
            with self.policy.in_training():
                scores = self._scores(chosen)
            batch = token_batch(chosen, [weights[signal[i]] for i in group], self.policy.device)
            loss, metrics = objective(scores, batch)
            if not torch.isfinite(loss):
                return self._skip(chosen, objective)
            (loss / divisor).backward()
            self.optimizer.collect()
            metrics |= {
                "policy/entropy": (float(scores.entropies.detach().sum()), float(len(batch.behaviour))),
                "policy/mismatch": (
                    float((scores.logprobs.detach() - batch.behaviour).abs().sum()),
                    len(batch.behaviour),
                ),
                "loss/total": (float(loss.detach()), 0.0),
            }
            add_totals(totals, metrics)
        norm = self.optimizer.step()
        if not math.isfinite(norm):
            return self._skip([samples[i] for i in signal], objective)
        self.skipped_in_a_row = 0
        self.policy.version += 1
        totals["loss/total"] = (totals["loss/total"][0], float(divisor))
        return totals | {"optimizer/gradient_norm": (norm, 1.0), "optimizer/skipped": (0.0, 1.0)}

    def take_messages(self) -> list[str]:
        """What there was to say since the last call: skipped updates and the episodes behind them."""
        messages, self._messages = self._messages, []
        return messages

    def logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Log-probabilities [n] float32 of the sampled tokens of each sample, without gradient."""
        found: dict[int, np.ndarray] = {}
        with torch.no_grad():
            for group in self._groups(samples):
                chosen = [samples[i] for i in group]
                parts = self._scores(chosen).logprobs.float().cpu().numpy()
                ends = np.cumsum([s.sampled_tokens for s in chosen])[:-1]
                found |= dict(zip(group, np.split(parts, ends), strict=True))
        return [found[i] for i in range(len(samples))]

    def _groups(self, samples: Sequence[Sample]) -> Iterator[list[int]]:
        for group in pack(samples, self.recipe.tokens_per_batch):
            self.trained_tokens += sum(len(samples[i].stream) for i in group)
            yield group

    def _scores(self, samples: Sequence[Sample]) -> TokenScores:
        ids, sampled = [s.stream.ids for s in samples], [s.stream.sampled for s in samples]
        return self.policy.score(ids, sampled, self.temperature, self.recipe.logits_per_chunk)

    def _skip(self, suspects: Sequence[Sample], objective: Objective) -> Totals:
        """Leave the weights as they are; stop the run when that happens too often in a row."""
        self.optimizer.clear()
        culprits = [s.label for s in suspects if not self._is_finite(s, objective)] or [s.label for s in suspects]
        self.skipped_in_a_row += 1
        named = ", ".join(culprits[:3]) + (f" and {len(culprits) - 3} more" if len(culprits) > 3 else "")
        self._messages.append(f"update skipped: loss or gradient is not finite for {named}")
        if self.skipped_in_a_row > self.optimizer.recipe.max_skipped_updates:
            raise RunError(
                f"{self.skipped_in_a_row} updates in a row had a loss or gradient that is not finite, the last for "
                f"{named}; lower optimizer.learning_rate, or look at these episodes with `posttrain episodes`"
            )
        return {"optimizer/skipped": (1.0, 1.0)}

    def _is_finite(self, sample: Sample, objective: Objective) -> bool:
        """Whether this sample alone gives a finite loss and gradient."""
        loss, _ = objective(self._scores([sample]), token_batch([sample], [1.0], self.policy.device))
        finite = bool(torch.isfinite(loss))
        if finite:
            loss.backward()
            finite = all(bool(torch.isfinite(p.grad).all()) for p in self.optimizer.parameters if p.grad is not None)
        self.optimizer.clear()
        return finite


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


def add_totals(totals: Totals, more: Totals) -> None:
    """Add (sum, count) metrics into `totals`."""
    for key, (value, count) in more.items():
        old = totals.get(key, (0.0, 0.0))
        totals[key] = (old[0] + float(value), old[1] + float(count))


def means(totals: Totals) -> dict[str, float]:
    """Metrics as means; those that never counted anything are left out."""
    return {key: value / count for key, (value, count) in totals.items() if count}
