"""Streams packed in one row without padding, and the layouts that define what each token of a row attends to.

- `pack_row`: streams as a prefix tree. Shared prefixes are computed once: the prompt of a group, and every turn up to
  the point where two episodes diverge.
- `probed_layout`: streams followed by probe tokens, each of which ends a prefix of its stream.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from posttrain.distributed.world import current_world
from posttrain.models.cpu.attention import MaskCache, attend_segments
from posttrain.models.cuda.attention import Spans, attend_spans, spans_of, supports
from posttrain.models.forward import routing_of, states_at, upload
from posttrain.models.layers import Heads, Lengths, RowSegment, causal_attention
from posttrain.models.sequence import DividedLayout, GatheredOutputs

# -- layouts -----------------------------------------------------------------------------------------------------------


class PackedLayout:
    """Segments side by side in one row. Each token gets the output and gradient that it would get if its stream ran
    alone."""

    def __init__(self, segments: Sequence[RowSegment]) -> None:
        """`segments`: non-empty; together they cover the row in order, without gaps."""
        self.segments = list(segments)
        self._masks = MaskCache()
        self._spans: Spans | None = None

    def positions(self) -> torch.Tensor:
        """Position ids [T] int64: each token's index in its stream."""
        return torch.cat([torch.arange(s.seen, s.seen + s.stop - s.start) for s in self.segments])

    def parts(self) -> list[tuple[int, int, "PackedLayout"]]:
        """(start, stop, layout) of the parts of the row that do not attend to each other: one for each length that
        decides rotary frequencies. None has more tokens than the prefix tree of the streams."""
        parts = []
        for length, group in groupby(self.segments, key=lambda segment: segment.length):
            segments = list(group)
            first = segments[0].start
            moved = []
            for s in segments:
                before = tuple((start - first, stop - first) for start, stop in s.before)
                moved.append(RowSegment(s.start - first, s.stop - first, before, length))
            parts.append((first, segments[-1].stop, PackedLayout(moved)))
        return parts

    def lengths(self) -> list[int] | None:
        """For each token the length that decides its rotary frequencies; None if it is 0 for all."""
        if not any(segment.length for segment in self.segments):
            return None
        return [segment.length for segment in self.segments for _ in range(segment.start, segment.stop)]

    def streams(self) -> list[np.ndarray]:
        """The row indices of the tokens of each stream, int64, without streams that begin another one."""
        begun = [span for segment in self.segments for span in segment.before]
        return [
            np.concatenate([np.arange(*span) for span in segment.keys])
            for segment in self.segments
            if not any(start <= segment.start and segment.stop <= stop for start, stop in begun)
        ]

    def attend(self, layer: int, heads: Heads) -> torch.Tensor:
        query, key, value, scaling, window, bounds = heads
        usual = bounds is None and value.shape[-1] == query.shape[-1]
        if usual and query.device.type == "cpu":
            return attend_segments(query, key, value, self.segments, scaling, window, self._masks)
        if usual and supports(query.device, query.dtype, query.shape[-1]):
            self._spans = self._spans or spans_of(self.segments, query.device)
            return attend_spans(self._spans, query, key, value, scaling, window)
        outputs = []
        for segment in self.segments:
            keys, values = (torch.cat([rows[:, slice(*span)] for span in segment.keys], 1) for rows in (key, value))
            queries = query[:, segment.start : segment.stop]
            outputs.append(causal_attention(Heads(queries, keys, values, scaling, window, bounds)))
        return torch.cat(outputs, dim=1)


def probed_layout(streams: Sequence[tuple[int, Sequence[int]]]) -> PackedLayout:
    """Streams side by side in one row, each followed by its probes.

    A probe is one token that attends to a prefix of its stream and to itself, at the position that follows the prefix.
    Its output is that of the stream cut after the prefix and ended with the probe, while the stream is computed once.

    Args:
        streams: for each stream its length, and for each of its probes the length of the prefix (at least 1).
    """
    segments = []
    start = 0
    for length, prefixes in streams:
        first = start + length
        segments.append(RowSegment(start, first))
        segments += [RowSegment(first + i, first + i + 1, ((start, start + seen),)) for i, seen in enumerate(prefixes)]
        start = first + len(prefixes)
    return PackedLayout(segments)


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedRow:
    """S streams in one row of T tokens, and the positions that predict their n sampled tokens."""

    ids: np.ndarray
    """[T] int64: token ids."""
    layout: PackedLayout
    places: list[np.ndarray]
    """[T_i] int64 for each stream: the row index of each of its tokens."""
    predictors: np.ndarray
    """[n] int64: row index whose output predicts each sampled token, stream by stream in the given order."""
    targets: np.ndarray
    """[n] int64: the sampled tokens."""
    experts: np.ndarray | None = None
    """[T, R, k]: the experts to use for each token at each of R routers; -1 leaves the choice to the router."""

    def distinct(self) -> tuple[np.ndarray, np.ndarray]:
        """Indices [u] of one representative of each distinct sampled token of the row, and [n] the representative of
        each token."""
        kinds = self.predictors * (self.targets.max(initial=0) + 1) + self.targets
        _, first, kind = np.unique(kinds, return_index=True, return_inverse=True)
        return first, kind


def prompt_length(sampled: np.ndarray) -> int:
    """Number of tokens before the first sampled one of a stream with mask `sampled` [T] bool."""
    return int(np.argmax(sampled))


def pack_row(
    streams: Sequence[np.ndarray],
    sampled: Sequence[np.ndarray],
    lengths: Lengths | None = None,
    experts: Sequence[np.ndarray | None] = (),
) -> PackedRow:
    """Pack `streams` (token ids [T_i] int64) with masks `sampled` [T_i] bool into one row, as a prefix tree.

    Equal tokens after equal prefixes are stored once, sampled or not, whichever stream they are from. Each stream has
    at least one sampled token, and its first token is not sampled. With `lengths`, a stream is stored once for each set
    of rotary frequencies that its tokens are predicted with. `experts`: `Stream.experts` of each stream, or none; a shared
    token has those of the first stream that has some.
    """
    segments: list[RowSegment] = []
    pieces: list[np.ndarray] = []
    places = [np.zeros(len(ids), np.int64) for ids in streams]
    end = 0
    # For each length that decides frequencies: (stream, first token that reads its outputs there, stop).
    by_length: dict[int, list[tuple[int, int, int]]] = {}
    for stream, ids in enumerate(streams):
        for length, first, stop in [(0, 0, len(ids))] if lengths is None else lengths.spans(len(ids)):
            by_length.setdefault(length, []).append((stream, first, stop))
    for length, versions in by_length.items():
        path: tuple[tuple[int, int], ...] = ()
        for index, shared in tree_order([streams[stream][:stop] for stream, _, stop in versions]):
            stream, first, stop = versions[index]
            kept, left = [], shared  # the ranges of the tokens that it shares
            for start, end_of_span in path:
                if left > 0:
                    kept.append((start, min(end_of_span, start + left)))
                left -= end_of_span - start
            path = tuple(kept)
            if stop > shared:
                until = end + stop - shared
                segments.append(RowSegment(end, until, path, length))
                pieces.append(streams[stream][shared:stop])
                path = (*path[:-1], (path[-1][0], until)) if path and path[-1][1] == end else (*path, (end, until))
                end = until
            places[stream][first:stop] = np.concatenate([np.arange(*span) for span in path])[first:]
    chosen = None
    for at, of_stream in zip(reversed(places), reversed(experts), strict=False):
        if of_stream is not None:
            chosen = np.full((end, *of_stream.shape[1:]), -1, of_stream.dtype) if chosen is None else chosen
            known = of_stream[:, 0, 0] >= 0
            chosen[at[known]] = of_stream[known]
    return PackedRow(
        ids=np.concatenate(pieces),
        layout=PackedLayout(segments),
        places=places,
        predictors=np.concatenate([at[:-1][mask[1:]] for at, mask in zip(places, sampled, strict=True)]),
        targets=np.concatenate([ids[mask] for ids, mask in zip(streams, sampled, strict=True)]),
        experts=chosen,
    )


def tree_order(streams: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """(index, tokens shared with the previous stream) of each stream, ordered so that no earlier stream shares more."""
    # Sorting fixed-width ids by their bytes puts equal prefixes side by side.
    order = sorted(range(len(streams)), key=lambda index: streams[index].tobytes())
    return [(index, _shared(streams[order[at - 1]], streams[index]) if at else 0) for at, index in enumerate(order)]


def row_length(streams: Sequence[np.ndarray]) -> int:
    """Tokens of the row of `streams`."""
    return sum(len(streams[index]) - shared for index, shared in tree_order(streams))


def _shared(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix of `a` and `b`, in tokens."""
    count = min(len(a), len(b))
    differs = a[:count] != b[:count]
    return int(differs.argmax()) if differs.any() else count


class RowPart:
    """The part of a row that this process computes: the whole row without sequence parallelism.

    Attributes:
        divided: whether other processes compute other parts.
        mine: which of the places that the caller asked for are in this part, [m] int64; `slice(None)` for a whole row.
    """

    def __init__(
        self, ids: np.ndarray, layout: PackedLayout, at: np.ndarray, device: torch.device, row: PackedRow | None = None
    ) -> None:
        """`ids` [T] int64 and `layout` of a whole row, and the places `at` [n] int64 in it whose outputs are needed. `row`: the
        row that they are from, whose experts are used and whose tokens routers count."""
        world = current_world()
        count, rank = world.hardware.sequence_parallel, world.sequence_rank
        self.divided = count > 1
        self.mine: Any = slice(None)
        own: Any = layout
        tokens = slice(None)
        if self.divided:
            if missing := -len(ids) % count:  # tokens that attend to each other only
                layout = PackedLayout([*layout.segments, RowSegment(len(ids), len(ids) + missing)])
                ids = np.pad(ids, (0, missing))
            size = len(ids) // count
            tokens = slice(rank * size, (rank + 1) * size)
            own = DividedLayout(layout, tokens)
            owner = at // size
            self.mine = np.flatnonzero(owner == rank)
            # Each process sends as many outputs as the one with the most.
            counts, order = np.bincount(owner, minlength=count), np.argsort(owner, kind="stable")
            self._most, places = int(counts.max()), np.empty(len(at), np.int64)
            places[order] = np.concatenate([of * self._most + np.arange(n) for of, n in enumerate(counts)])
            self._places = upload(places, device)
            at = at[self.mine] - tokens.start
        self._row = upload(ids[tokens], device), upload(layout.positions()[tokens], device), own, upload(at, device)
        self._routed: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
        if row is not None:
            experts, times = row.experts, np.bincount(np.concatenate(row.places), minlength=len(ids)).astype(np.float32)
            if experts is not None:
                experts = np.pad(experts, ((0, len(ids) - len(experts)), (0, 0), (0, 0)), constant_values=-1)[tokens]
            self._routed = None if experts is None else upload(experts, device), upload(times[tokens], device)

    def states(self, model: torch.nn.Module) -> torch.Tensor:
        """The last hidden states [m, hidden] of the places in this part."""
        routing = routing_of(model)
        with nullcontext() if routing is None else routing.row(*self._routed):
            return states_at(model, *self._row)

    def gather(self, outputs: torch.Tensor) -> torch.Tensor:
        """The outputs [n, ...] at all places, from those [m, ...] in this part; differentiable in the latter."""
        if not self.divided:
            return outputs
        return GatheredOutputs.apply(outputs, self._places.to(outputs.device), self._most, self.mine)
