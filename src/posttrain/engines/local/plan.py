"""How the decoding sequences of a pass read the cache: page by page, neighbouring slots together, shared pages once."""

from collections.abc import Sequence
from dataclasses import dataclass

PAGE = 128
"""Tokens of a page. Every row of a product over a page takes all of it, so half of the last one is read in vain."""
GAP = 8
"""Slots between two that need a page, up to which it costs less to read theirs too than to start another product."""
WORTH_SHARING = 512
"""Cached tokens that must be read less for shared pages to be attended apart."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """A beginning that several slots hold, `tokens` long; the same object marks the same tokens."""

    tokens: int


@dataclass(frozen=True)
class Segment:
    """New tokens of one sequence in a forward pass: positions start .. start + count - 1 of `slot`."""

    slot: int
    start: int
    count: int
    prefix: Prefix | None = None
    """What the sequence has in common with others; not longer than `start`."""


@dataclass(frozen=True)
class Block:
    """One page of neighbouring slots, first .. stop - 1."""

    page: int
    first: int
    stop: int


@dataclass(frozen=True)
class Shared:
    """Slots whose first `pages` pages hold the same tokens; those of the first slot are read for all."""

    slots: list[int]
    pages: int


@dataclass(frozen=True)
class Plan:
    """What decoding reads: `shared` pages and `blocks` of own ones, in slots first .. stop - 1 and `pages` pages."""

    first: int
    stop: int
    pages: int
    blocks: list[Block]
    shared: list[Shared]


def plan_decoding(singles: Sequence[Segment], window: int | None, share: bool) -> Plan:
    """The plan for segments of one token each, sorted by slot; with a `window`, pages before it are left out."""
    shared = shared_pages(singles) if share else []
    skipped = {slot: group.pages for group in shared for slot in group.slots}
    pages = max(s.start for s in singles) // PAGE + 1
    blocks = []
    for page in range(pages):
        needing = [
            s.slot
            for s in singles
            if skipped.get(s.slot, 0) <= page <= s.start // PAGE
            and (window is None or (page + 1) * PAGE > s.start + 1 - window)
        ]
        blocks += _blocks(page, needing)
    return Plan(singles[0].slot, singles[-1].slot + 1, pages, blocks, shared)


def shared_pages(singles: Sequence[Segment]) -> list[Shared]:
    """Groups of slots that hold the same first pages, where it pays to read those once."""
    groups: dict[Prefix, list[int]] = {}
    for segment in singles:
        if segment.prefix is not None:
            groups.setdefault(segment.prefix, []).append(segment.slot)
    found = [Shared(slots, prefix.tokens // PAGE) for prefix, slots in groups.items()]
    return [group for group in found if (len(group.slots) - 1) * group.pages * PAGE >= WORTH_SHARING]


def _blocks(page: int, slots: Sequence[int]) -> list[Block]:
    blocks: list[Block] = []
    for slot in slots:
        if blocks and slot - blocks[-1].stop <= GAP:
            blocks[-1] = Block(page, blocks[-1].first, slot + 1)
        else:
            blocks.append(Block(page, slot, slot + 1))
    return blocks
