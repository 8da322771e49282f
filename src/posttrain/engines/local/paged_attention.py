"""Attention of decoding sequences over the paged key/value cache.

The compiled kernel attends to every sequence by itself. Without it, torch computes matrix products over blocks: one page
of neighboring slots each. Either way, pages that several slots share are read once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from posttrain.engines.local.cpu.kernel import PAGE, DecodingKernel, decoding_kernel

MAX_SLOT_GAP = 8
"""Unneeded slots between two needed ones that a block includes, because reading them costs less than another product."""
MIN_SAVED_TOKENS = 512
"""Cached tokens that sharing a prefix must save before its pages are attended separately."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """The first `tokens` tokens that several slots have in common; the same object marks the same tokens."""

    tokens: int


@dataclass(frozen=True)
class Segment:
    """New tokens of one sequence in a forward pass: positions start .. start + count - 1 of `slot`."""

    slot: int
    start: int
    count: int
    prefix: Prefix | None = None
    """The prefix that the sequence shares with others; not longer than `start`."""


# -- planning -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """One page of the neighboring slots first .. stop - 1."""

    page: int
    first: int
    stop: int


@dataclass(frozen=True)
class SharedPages:
    """Slots whose first `pages` pages hold the same tokens; those of the first slot are read for all."""

    slots: list[int]
    pages: int


@dataclass(frozen=True)
class Plan:
    """What decoding reads: `shared` pages and `blocks`, in slots first .. stop - 1 and in the first `pages` pages."""

    first: int
    stop: int
    pages: int
    blocks: list[Block]
    shared: list[SharedPages]


def plan_decoding(singles: Sequence[Segment], window: int | None, share: bool) -> Plan:
    """The plan for segments of one token each, sorted by slot. Pages before the `window` are not read."""
    shared = shared_pages(singles) if share else []
    skipped = {slot: group.pages for group in shared for slot in group.slots}
    pages = max(s.start for s in singles) // PAGE + 1
    blocks = []
    for page in range(pages):
        slots = [
            s.slot
            for s in singles
            if skipped.get(s.slot, 0) <= page <= s.start // PAGE
            and (window is None or (page + 1) * PAGE > s.start + 1 - window)
        ]
        blocks += _blocks(page, slots)
    return Plan(singles[0].slot, singles[-1].slot + 1, pages, blocks, shared)


def shared_pages(singles: Sequence[Segment]) -> list[SharedPages]:
    """Groups of slots with the same first pages, if reading those once saves enough tokens."""
    groups: dict[Prefix, list[int]] = {}
    for segment in singles:
        if segment.prefix is not None:
            groups.setdefault(segment.prefix, []).append(segment.slot)
    shared = [SharedPages(slots, prefix.tokens // PAGE) for prefix, slots in groups.items()]
    return [group for group in shared if (len(group.slots) - 1) * group.pages * PAGE >= MIN_SAVED_TOKENS]


def _blocks(page: int, slots: Sequence[int]) -> list[Block]:
    blocks: list[Block] = []
    for slot in slots:
        if blocks and slot - blocks[-1].stop <= MAX_SLOT_GAP:
            blocks[-1] = Block(page, blocks[-1].first, slot + 1)
        else:
            blocks.append(Block(page, slot, slot + 1))
    return blocks


# -- attention ----------------------------------------------------------------------------------------------------------


class DecodingAttention(Protocol):
    """Attention of the decoding sequences of a pass, for all layers with one window."""

    def __call__(self, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, scaling: float) -> torch.Tensor:
        """Outputs [B, H_kv, G, D] for queries `rows` [B, H_kv, G, D]; keys and values [pages, slots, H_kv, PAGE, D]."""
        ...


def decoding_attention(singles: Sequence[Segment], window: int | None, rows: torch.Tensor) -> DecodingAttention:
    """The fastest implementation for segments of one token, sorted by slot; `rows` gives dtype, device and head sizes."""
    if rows.device.type == "cpu":
        kernel = decoding_kernel(rows.dtype, rows.shape[-1], rows.shape[-2])
        if kernel is not None:
            return CompiledDecodingAttention(kernel, singles, window)
    return TorchDecodingAttention(singles, window, rows.device)


class CompiledDecodingAttention:
    """Attends to each sequence separately. Sequences that share pages read the same ones, which stay in the CPU cache."""

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


class TorchDecodingAttention:
    """Attention by a `Plan`.

    It works on all slots from the first to the last that decodes, so that memory is contiguous. Rows of slots in between
    are computed and discarded.
    """

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
            scores[local, ..., block.page * PAGE : (block.page + 1) * PAGE] = _scores(page, queries[local])
        for group, slots in self._groups:
            scores[slots, ..., : group.pages * PAGE] = self._shared_scores(group, slots, keys, queries).float()
        weights = scores.masked_fill_(self._hidden, -torch.inf).softmax(-1).to(rows.dtype)
        out = rows.new_zeros(self.span, heads, groups, size)
        for group, slots in self._groups:
            out.index_add_(0, slots, self._shared_values(group, slots, values, weights))
            # A block may include slots of the group; it must not add their shared pages again.
            weights[slots, ..., : group.pages * PAGE] = 0
        for block in self.plan.blocks:
            local = slice(block.first - first, block.stop - first)
            part = weights[local, ..., block.page * PAGE : (block.page + 1) * PAGE]
            out[local] += part @ values[block.page, block.first : block.stop]
        return out if self._slots is None else out[self._slots]

    def _shared_scores(
        self, group: SharedPages, slots: torch.Tensor, keys: torch.Tensor, queries: torch.Tensor
    ) -> torch.Tensor:
        """Scores [R, H_kv, G, columns] of a group's R rows with its shared pages, by one product per key head."""
        rows = queries[slots]
        stacked = rows.transpose(0, 1).flatten(1, 2)
        common = keys[: group.pages, group.slots[0]].transpose(0, 1).flatten(1, 2)
        return (stacked @ common.transpose(1, 2)).unflatten(1, rows.shape[::2][:2]).transpose(0, 1)

    def _shared_values(
        self, group: SharedPages, slots: torch.Tensor, values: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted values [R, H_kv, G, D] of the shared pages for a group's R rows."""
        rows = weights[slots, ..., : group.pages * PAGE]
        common = values[: group.pages, group.slots[0]].transpose(0, 1).flatten(1, 2)
        return (rows.transpose(0, 1).flatten(1, 2) @ common).unflatten(1, rows.shape[::2][:2]).transpose(0, 1)


def _scores(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Scores [R, H_kv, G, L] of `queries` [R, H_kv, G, D] with `keys` [R, H_kv, L, D].

    In bfloat16 a CPU multiplies the large matrix by the small one much faster than the other way round, which copies the
    large one into another layout first.
    """
    if keys.dtype == torch.bfloat16:
        return (keys @ queries.transpose(2, 3)).transpose(2, 3)
    return queries @ keys.transpose(2, 3)
