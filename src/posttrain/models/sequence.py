"""Sequence parallelism: the part of a packed row that this process computes (`hardware.sequence_parallel`).

P processes compute a row together. Each has an equal share of its tokens, in the order of the row. What a decoder computes
per token, it computes for these. For attention, heads and tokens change places by all-to-all: each process attends with its
share of the heads over the whole row, by the row's own layout, so prefix trees, windows and soft caps need nothing further.
Each process scores the tokens that its part of the row predicts, and gets the scores of the others. Losses are computed from
all of them on every process, and their gradients go back into the process's own scores, so that the sum of the gradients of
weights over all processes is the whole gradient.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509. With fewer key heads than processes, each is sent to all
processes whose query heads it serves.
"""

import math
from typing import Any

import numpy as np
import torch

from posttrain.distributed.world import current_world, sequence_group
from posttrain.errors import InputError
from posttrain.models.forward import path_of, transformer, upload
from posttrain.models.layers import Heads, is_by_stream


def refuse_undivided(model: torch.nn.Module) -> None:
    """InputError, which names the model type, if P processes cannot compute a row of `model` together."""
    count = current_world().hardware.sequence_parallel
    if count == 1:
        return
    config, path = transformer(model).config, path_of(model)
    heads = getattr(config.get_text_config(), "num_attention_heads", 0)
    if not path.packed:
        reason, remedy = f"their rows are not packed, because {path.reason}", "1"
    elif any(is_by_stream(module) for module in model.modules()):
        reason, remedy = "their convolutions or recurrences need the tokens of a whole stream", "1"
    elif not heads or heads % count:
        reason, remedy = f"{count} processes cannot share {heads} attention heads", f"a divisor of {heads}"
    else:
        return
    raise InputError(
        f"hardware.sequence_parallel: {config.model_type} models do not support it: {reason}; set it to {remedy}"
    )


class DividedLayout:
    """The layout of the consecutive `tokens` of a row that this process computes."""

    def __init__(self, whole: Any, tokens: slice) -> None:
        self.whole, self.tokens = whole, tokens

    def lengths(self) -> list[int] | None:
        """As `PackedLayout.lengths`, for the tokens of this process."""
        lengths = self.whole.lengths()
        return None if lengths is None else lengths[self.tokens]

    def attend(self, layer: int, heads: Heads) -> torch.Tensor:
        """As `Layout.attend`, over all tokens of the row."""
        query, key, value, _, _, bounds = heads
        world = current_world()
        count = world.hardware.sequence_parallel
        if (copies := math.lcm(len(key), count) // len(key)) > 1:
            key, value = key.repeat_interleave(copies, 0), value.repeat_interleave(copies, 0)
        # [P, H / P, t, D]: the heads of each process, of the t tokens of this one.
        parts = [rows.unflatten(0, (count, -1)) for rows in (query, key, value)]
        received = _Exchange.apply(torch.cat([part.transpose(1, 2).flatten(2) for part in parts], dim=2)).flatten(0, 1)
        columns = received.split([part.shape[1] * part.shape[3] for part in parts], dim=1)
        query, key, value = (
            rows.unflatten(1, (part.shape[1], part.shape[3])).transpose(0, 1)
            for rows, part in zip(columns, parts, strict=True)
        )
        if bounds is not None and bounds.sinks is not None:
            bounds = bounds._replace(sinks=bounds.sinks.chunk(count)[world.sequence_rank])
        divided = heads._replace(query=query, key=key, value=value, bounds=bounds)
        out = self.whole.attend(layer, divided)  # [H / P, T, D_v]
        sent = out.transpose(0, 1).flatten(1).unflatten(0, (count, -1))
        # Contiguous by token, as attention of one process returns it and some models expect it.
        return _Exchange.apply(sent).transpose(0, 1).flatten(1).unflatten(1, (count * len(out), -1)).transpose(0, 1)


class _Exchange(torch.autograd.Function):
    """Rows [P, t, D], of which the r-th is for process r -> rows of the same shape, of which the r-th is from process r."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(rows, memory_format=torch.contiguous_format)
        torch.distributed.all_to_all_single(received, rows.contiguous(), group=sequence_group())
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        return _Exchange.apply(gradients[0])


class GatheredOutputs(torch.autograd.Function):
    """Own outputs [m, ...] -> those of all processes [n, ...]. All have the same loss, so the gradient of the own outputs is
    the loss's."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, places: torch.Tensor, most: int, mine: np.ndarray) -> torch.Tensor:
        ctx.mine = upload(mine, own.device)
        padded = own.new_zeros(most, *own.shape[1:])
        padded[: len(own)] = own
        everyone = [torch.empty_like(padded) for _ in range(current_world().hardware.sequence_parallel)]
        torch.distributed.all_gather(everyone, padded, group=sequence_group())
        return torch.cat(everyone)[places]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None, None, None]:
        return gradients[0][ctx.mine], None, None, None
