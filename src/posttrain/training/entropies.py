"""Entropies of a frozen language model, which cut answers into units."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from posttrain.models.forward import hidden_states, token_scores
from posttrain.models.packing import pack_row
from posttrain.training.batches import Sample, pack

_POSITIONS_PER_CHUNK = 512
"""Positions whose logits exist at a time while entropies are measured."""


def entropies_under(model: torch.nn.Module, samples: Sequence[Sample], tokens_per_batch: int) -> list[np.ndarray]:
    """[n] float32 of each sample: nats, of the distributions at temperature 1 that its sampled tokens were drawn from.

    `tokens_per_batch`: most tokens of a forward pass, which has no gradient.
    """
    found: dict[int, np.ndarray] = {}
    alone = [replace(sample, side=None) for sample in samples]  # any sample may stand beside any other
    device = next(model.parameters()).device
    for group in pack(alone, tokens_per_batch):
        row = pack_row([alone[i].stream.ids for i in group], [alone[i].stream.sampled for i in group])
        ids, positions, predictors, targets = (
            part.to(device)
            for part in (
                torch.from_numpy(row.ids),
                row.layout.positions(),
                torch.from_numpy(row.predictors),
                torch.from_numpy(row.targets),
            )
        )
        with torch.no_grad():
            hidden = hidden_states(model, ids, positions, row.layout)[predictors]
            scores = token_scores(model, hidden, targets, 1.0, _POSITIONS_PER_CHUNK)
        cuts = np.cumsum([alone[i].sampled_tokens for i in group])[:-1]
        found |= dict(zip(group, np.split(scores.entropies.float().cpu().numpy(), cuts), strict=True))
    return [found[i] for i in range(len(samples))]
