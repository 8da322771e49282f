"""A language model on padded batches with full logits: the plain way to score tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class Padded:
    """B streams of at most T tokens, padded on the right. All floats are float64."""

    ids: torch.Tensor
    """[B, T] int64."""
    attended: torch.Tensor
    """[B, T] bool: False for padding."""
    sampled: torch.Tensor
    """[B, T] bool: tokens that the policy sampled."""
    episode: torch.Tensor
    """[B] int64: the episode of each stream."""
    group: torch.Tensor
    """[B] int64: the group of each stream."""


@dataclass
class Scores:
    """What a model says of each token, given the tokens before it. The first token of a stream has 0 everywhere."""

    logprobs: torch.Tensor
    """[B, T] in nats."""
    entropy: torch.Tensor
    """[B, T] in nats, of the distribution that the token was drawn from."""
    squares: torch.Tensor
    """[B, T]: sum of the squared probabilities of that distribution."""


def pad(streams: Sequence[tuple[Sequence[int], Sequence[bool], int, int]]) -> Padded:
    """Streams as (ids, sampled, episode, group)."""
    longest = max(len(ids) for ids, *_ in streams)
    batch = Padded(
        ids=torch.zeros(len(streams), longest, dtype=torch.int64),
        attended=torch.zeros(len(streams), longest, dtype=torch.bool),
        sampled=torch.zeros(len(streams), longest, dtype=torch.bool),
        episode=torch.tensor([episode for *_, episode, _ in streams]),
        group=torch.tensor([group for *_, group in streams]),
    )
    for row, (ids, sampled, *_) in enumerate(streams):
        batch.ids[row, : len(ids)] = torch.as_tensor(ids)
        batch.sampled[row, : len(ids)] = torch.as_tensor(sampled)
        batch.attended[row, : len(ids)] = True
    return batch


def spread(values: Sequence[Sequence[float]], batch: Padded) -> torch.Tensor:
    """[B, T]: `values[b]` at the sampled tokens of stream b, in order, and 0 elsewhere."""
    full = torch.zeros(batch.ids.shape, dtype=torch.float64)
    for row, numbers in enumerate(values):
        full[row, batch.sampled[row]] = torch.as_tensor(numbers, dtype=torch.float64)
    return full


def score(model: torch.nn.Module, batch: Padded, temperature: float = 1.0) -> Scores:
    """Full logits of the padded batch, then a softmax over the vocabulary."""
    logits = model(input_ids=batch.ids, attention_mask=batch.attended.long()).logits
    log_p = torch.log_softmax(logits[:, :-1].double() / temperature, dim=-1)
    taken = log_p.gather(-1, batch.ids[:, 1:, None]).squeeze(-1)
    p = log_p.exp()

    def shifted(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros_like(values[:, :1]), values], dim=1)

    return Scores(shifted(taken), shifted(-(p * log_p).sum(-1)), shifted((p * p).sum(-1)))
