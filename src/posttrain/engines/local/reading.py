"""How decoding sequences read the cache: by the compiled kernel where there is one, else by products of torch."""

from collections.abc import Sequence
from typing import Protocol

import torch

from posttrain.engines.local.cpu.kernel import DecodingKernel, decoding_kernel
from posttrain.engines.local.paged_attention import PAGE, Segment, Shared, plan_decoding, shared_pages


class Reader(Protocol):
    """Attention of the decoding rows of a pass."""

    def __call__(self, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, scaling: float) -> torch.Tensor:
        """[B, H_kv, G, D] for queries `rows` [B, H_kv, G, D]; keys and values [pages, slots, H_kv, PAGE, D]."""
        ...


def reader_of(singles: Sequence[Segment], window: int | None, rows: torch.Tensor) -> Reader:
    """The fastest reader for segments of one token, sorted by slot, whose queries are like `rows`."""
    if rows.device.type == "cpu":
        kernel = decoding_kernel(rows.dtype, rows.shape[-1], rows.shape[-2])
        if kernel is not None:
            return CompiledReader(kernel, singles, window)
    return TorchReader(singles, window, rows.device)


class CompiledReader:
    """Every sequence by itself; those that share pages read the same ones, which stay in the processor's cache."""

    def __init__(self, kernel: DecodingKernel, singles: Sequence[Segment], window: int | None) -> None:
        self._kernel = kernel
        groups = shared_pages(singles) if window is None else []
        shared = {slot: (group.slots[0], group.pages) for group in groups for slot in group.slots}
        self._rows = torch.tensor(
            [
                (s.slot, *shared.get(s.slot, (s.slot, 0)), max(0, s.start + 1 - (window or s.start + 1)), s.start + 1)
                for s in singles
            ]
        )

    def __call__(self, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, scaling: float) -> torch.Tensor:
        return self._kernel.attend(rows, keys, values, self._rows, scaling)


class TorchReader:
    """Attention of decoding rows by a plan. It works on all slots from the first to the last that decodes, so that
    what it reads and writes is in one piece; the rows of slots in between are computed in vain."""

    def __init__(self, singles: Sequence[Segment], window: int | None, device: torch.device) -> None:
        plan = self.plan = plan_decoding(singles, window, share=window is None)
        self.span = plan.stop - plan.first
        slots = torch.tensor([s.slot - plan.first for s in singles])
        self._slots = slots.to(device) if len(singles) < self.span else None
        starts = torch.zeros(self.span, dtype=torch.int64).index_copy_(
            0, slots, torch.tensor([s.start for s in singles])
        )
        columns = torch.arange(plan.pages * PAGE)[None]
        hidden = columns > starts[:, None]
        if window is not None:
            hidden |= columns <= starts[:, None] - window
        self._hidden = hidden[:, None, None].to(device)
        self._groups = [(group, torch.tensor(group.slots, device=device) - plan.first) for group in plan.shared]

    def __call__(self, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, scaling: float) -> torch.Tensor:
        rows = rows * scaling
        heads, groups, size = rows.shape[1:]
        first = self.plan.first
        queries = rows
        if self._slots is not None:
            queries = rows.new_zeros(self.span, heads, groups, size).index_copy_(0, self._slots, rows)
        scores = rows.new_zeros(self.span, heads, groups, self.plan.pages * PAGE, dtype=torch.float32)
        for block in self.plan.blocks:
            local = slice(block.first - first, block.stop - first)
            page = keys[block.page, block.first : block.stop]
            scores[local, ..., block.page * PAGE : (block.page + 1) * PAGE] = _products(page, queries[local])
        for group, slots in self._groups:
            scores[slots, ..., : group.pages * PAGE] = self._shared_scores(group, slots, keys, queries).float()
        shares = scores.masked_fill_(self._hidden, -torch.inf).softmax(-1).to(rows.dtype)
        out = rows.new_zeros(self.span, heads, groups, size)
        for group, slots in self._groups:
            out.index_add_(0, slots, self._shared_values(group, slots, values, shares))
            # A block that reaches over the slots of a group must not add to them once more.
            shares[slots, ..., : group.pages * PAGE] = 0
        for block in self.plan.blocks:
            local = slice(block.first - first, block.stop - first)
            part = shares[local, ..., block.page * PAGE : (block.page + 1) * PAGE]
            out[local] += part @ values[block.page, block.first : block.stop]
        return out if self._slots is None else out[self._slots]

    def _shared_scores(
        self, group: Shared, slots: torch.Tensor, keys: torch.Tensor, queries: torch.Tensor
    ) -> torch.Tensor:
        """[R, H_kv, G, columns] for the R rows of a group: one product per key head over the pages that they share."""
        mine = queries[slots]
        together = mine.transpose(0, 1).flatten(1, 2)
        common = keys[: group.pages, group.slots[0]].transpose(0, 1).flatten(1, 2)
        return (together @ common.transpose(1, 2)).unflatten(1, mine.shape[::2][:2]).transpose(0, 1)

    def _shared_values(
        self, group: Shared, slots: torch.Tensor, values: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        """[R, H_kv, G, D]: what the R rows of a group take from the pages that they share."""
        mine = shares[slots, ..., : group.pages * PAGE]
        common = values[: group.pages, group.slots[0]].transpose(0, 1).flatten(1, 2)
        return (mine.transpose(0, 1).flatten(1, 2) @ common).unflatten(1, mine.shape[::2][:2]).transpose(0, 1)


def _products(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Scores [R, H_kv, G, L] of `queries` [R, H_kv, G, D] with `keys` [R, H_kv, L, D].

    In bfloat16 a processor multiplies the large matrix by the small one much faster than the other way round, where
    it would first lay out the large one anew.
    """
    if keys.dtype == torch.bfloat16:
        return (keys @ queries.transpose(2, 3)).transpose(2, 3)
    return queries @ keys.transpose(2, 3)
