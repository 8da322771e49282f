"""How the decoding sequences of a pass are attended: in runs of neighbouring slots, shared beginnings apart."""

from collections.abc import Sequence
from dataclasses import dataclass

WASTE = 192
"""Cached tokens that a run may read in vain for another row, about what starting another run costs."""
WORTH_SHARING = 1024
"""Cached tokens that must be read less for a shared beginning to be attended apart."""


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
    """What the sequence has in common with others; shorter than `start`."""


@dataclass(frozen=True)
class Run:
    """Decoding rows whose sequences stand in neighbouring slots, and the cached columns that they read."""

    rows: slice
    slots: slice
    columns: slice


@dataclass(frozen=True)
class Part:
    """Decoding rows that are attended together. Their first `tokens` columns, if any, are those of slot `source`; the
    runs read what comes after."""

    rows: slice
    source: int
    tokens: int
    runs: list[Run]


def plan_decoding(singles: Sequence[Segment], share: bool) -> tuple[list[Segment], list[Part]]:
    """The segments (of one token each) in the order of the rows, and the parts that attend them, in that order."""
    groups: dict[Prefix | None, list[Segment]] = {}
    for segment in singles:
        groups.setdefault(segment.prefix if share else None, []).append(segment)
    alone = groups.pop(None, [])
    ordered: list[Segment] = []
    parts: list[Part] = []

    def add(group: Sequence[Segment], tokens: int) -> None:
        rows = slice(len(ordered), len(ordered) + len(group))
        parts.append(Part(rows, group[0].slot, tokens, _runs(group, rows.start, tokens)))
        ordered.extend(sorted(group, key=_slot))

    for prefix, group in groups.items():
        assert prefix is not None
        if (len(group) - 1) * prefix.tokens >= WORTH_SHARING:
            add(group, prefix.tokens)
        else:
            alone += group
    if alone:
        add(alone, 0)
    return ordered, parts


def _runs(segments: Sequence[Segment], first_row: int, first_column: int) -> list[Run]:
    """Runs of neighbouring slots; a run ends where one more row would make it read too much in vain."""
    runs: list[Run] = []
    begin, longest = 0, 0
    ordered = sorted(segments, key=_slot)

    def close(end: int) -> None:
        rows = slice(first_row + begin, first_row + end)
        slots = slice(ordered[begin].slot, ordered[end - 1].slot + 1)
        runs.append(Run(rows, slots, slice(first_column, first_column + longest)))

    for place, segment in enumerate(ordered):
        length = segment.start + 1 - first_column
        if place > begin:
            count = place - begin
            wasted = max(length - longest, 0) * count + max(longest - length, 0)
            if segment.slot != ordered[place - 1].slot + 1 or wasted > WASTE:
                close(place)
                begin, longest = place, 0
        longest = max(longest, length)
    if ordered:
        close(len(ordered))
    return runs


def _slot(segment: Segment) -> int:
    return segment.slot
