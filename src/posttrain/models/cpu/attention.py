"""Exact attention on a CPU with a custom backward pass: that of PyTorch costs several times its matrix products.

Queries are processed in blocks, each against the tokens that any of its queries sees. The query heads that share a key head
are rows of one matrix product. Only queries, keys and values are kept for the backward pass, which recomputes the
probabilities as FlashAttention does (Dao et al. 2022, arXiv 2205.14135), so memory is linear in the number of tokens, but
for one mask per kind of block.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from posttrain.models.layers import RowSegment

BLOCK = 128
"""Maximum number of queries in a block: few enough to skip unseen keys, enough for the matrix units."""
LANES = 32
"""Keys are padded to a multiple of this: softmax kernels take about twice as long on rows of other lengths."""
BLOCK_COST = 6000
"""Cost of a block besides its products, in pairs of a query and a key. Short segments of a prefix tree share blocks where
this costs less, although their queries then meet keys that they do not see."""

Ranges = tuple[tuple[int, int], ...]
"""Ranges [start, stop) of a row's tokens."""


class _Run(NamedTuple):
    """Queries [start, stop) of one segment."""

    start: int
    stop: int
    keys: Ranges
    """What they see, in the stream's order. Without a window, the last query sees all of it."""
    position: int
    """Position in the stream of the first query."""
    first: int
    """Position in the stream of the first key."""


class _Block(NamedTuple):
    """Queries [start, stop) of the row, against K keys."""

    start: int
    stop: int
    keys: Ranges
    """At most K tokens of the row; zeros follow."""
    mask: torch.Tensor
    """[Q, K]: 0 if a query sees a key, minus infinity elsewhere."""


class BlockCache:
    """The blocks of segments, shared by all layers."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[object, ...], list[_Block]] = {}
        self._masks: dict[tuple[object, ...], torch.Tensor] = {}

    def __call__(
        self, segments: Sequence[RowSegment], window: int | None, dtype: torch.dtype, alone: bool = False
    ) -> list[_Block]:
        """The blocks of `segments`, with masks of `dtype`; `alone`: without keys that none of a block's queries sees, and
        with the queries of one segment each."""
        key = (tuple(segments), window, dtype, alone)
        if key not in self._blocks:
            runs = _runs(segments, window)
            shared = ((block, _union(block[0].keys)) for block in ([run] for run in runs)) if alone else _shared(runs)
            end = 0 if alone else max(segment.stop for segment in segments)
            self._blocks[key] = [self._block(block, keys, end, window, dtype) for block, keys in shared]
        return self._blocks[key]

    def _block(self, runs: Sequence[_Run], keys: Ranges, end: int, window: int | None, dtype: torch.dtype) -> _Block:
        start, stop = runs[0].start, runs[-1].stop
        width = _padded(_length(keys))
        if len(keys) == 1 and width <= end:  # more tokens of the row instead of zeros, so that nothing is copied
            first = min(keys[0][0], end - width)
            keys = ((first, first + width),)
        # Masks of equal blocks are the same tensor: those of streams of one length, for example.
        places = tuple(
            (run.start - start, run.stop - start, run.position - position, column, column + count)
            for run in runs
            for position, column, count in _columns(run, keys)
        )
        kind = (places, stop - start, width, window, dtype)
        if kind not in self._masks:
            mask = torch.full((stop - start, width), float("-inf"), dtype=dtype)
            for top, bottom, ahead, left, right in places:
                distance = ahead + torch.arange(bottom - top)[:, None] - torch.arange(right - left)
                seen = distance >= 0
                if window is not None:
                    seen &= distance < window
                mask[top:bottom, left:right].masked_fill_(seen, 0.0)
            self._masks[kind] = mask
        return _Block(start, stop, keys, self._masks[kind])


def attend_segments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Sequence[RowSegment],
    scaling: float,
    window: int | None,
    blocks: BlockCache,
) -> torch.Tensor:
    """Attention outputs [H, T, D] of `query` [H, T, D] over `key` and `value` [H_kv, T, D].

    `segments` cover every token once. Scores have the dtype of `query`; softmax and sums are in float32 or wider.
    """
    out = _BlockAttention.apply(query, key, value, blocks(segments, window, query.dtype), scaling)
    if out.detach().sum(dtype=torch.float32).isfinite():
        return out
    # A token that is not finite reaches all queries of its blocks, also those of other streams.
    return _BlockAttention.apply(query, key, value, blocks(segments, window, query.dtype, alone=True), scaling)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: list[_Block], scaling: float
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.how = (blocks, scaling)
        heads, tokens, width = query.shape
        # Token-major memory layout, as the output projection reads it.
        out = query.new_empty(tokens, heads, width).transpose(0, 1)
        for block in blocks:
            probabilities = _probabilities(_rows(query, block, len(key)), _keys_of(key, block), block.mask, scaling)
            _put_rows(out, block, torch.bmm(probabilities, _keys_of(value, block)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        blocks, scaling = ctx.how
        heads, tokens, width = query.shape
        shared = len(key)
        query_gradient = query.new_empty(tokens, heads, width).transpose(0, 1)
        # Several blocks add to the same keys, so sum in float32.
        wide = torch.float32 if query.dtype in (torch.bfloat16, torch.float16) else query.dtype
        key_gradient, value_gradient = (
            torch.zeros(tokens, shared, width, dtype=wide).transpose(0, 1) for _ in range(2)
        )
        unused = query.new_empty(())
        for block in blocks:
            keys, values = _keys_of(key, block), _keys_of(value, block)
            rows, above = _rows(query, block, shared), _rows(gradient, block, shared)
            probabilities = _probabilities(rows, keys, block.mask, scaling)
            _add_columns(value_gradient, block, torch.bmm(probabilities.transpose(1, 2), above))
            grad_probabilities = torch.bmm(above, values.transpose(1, 2))
            grad_scores = torch._softmax_backward_data(grad_probabilities, probabilities, -1, query.dtype)
            _put_rows(query_gradient, block, torch.baddbmm(unused, grad_scores, keys, beta=0, alpha=scaling))
            grad_keys = torch.baddbmm(unused, grad_scores.transpose(1, 2), rows, beta=0, alpha=scaling)
            _add_columns(key_gradient, block, grad_keys)
        return query_gradient, key_gradient.to(key.dtype), value_gradient.to(value.dtype), None, None


# -- which queries form a block ------------------------------------------------------------------------------------------


def _runs(segments: Sequence[RowSegment], window: int | None) -> Iterator[_Run]:
    for segment in segments:
        for start in range(segment.start, segment.stop, BLOCK):
            stop = min(start + BLOCK, segment.stop)
            position = segment.seen + start - segment.start
            first = 0 if window is None else max(0, position - window + 1)
            yield _Run(start, stop, _after((*segment.before, (segment.start, stop)), first), position, first)


def _shared(runs: Iterable[_Run]) -> Iterator[tuple[list[_Run], Ranges]]:
    """Consecutive runs that are cheaper in one block than each in its own, and the keys of all of them."""
    block: list[_Run] = []
    keys: Ranges = ()
    for run in runs:
        own = _union(run.keys)
        if block and run.start == block[-1].stop and run.stop - block[0].start <= BLOCK:
            joined = _union((*keys, *own))
            apart = _cost(block[0].start, block[-1].stop, keys) + _cost(run.start, run.stop, own)
            if _cost(block[0].start, run.stop, joined) < apart:
                block.append(run)
                keys = joined
                continue
        if block:
            yield block, keys
        block, keys = [run], own
    if block:
        yield block, keys


def _cost(start: int, stop: int, keys: Ranges) -> int:
    return (stop - start) * _padded(_length(keys)) + BLOCK_COST


def _columns(run: _Run, keys: Ranges) -> Iterator[tuple[int, int, int]]:
    """(position in the stream of its first key, its first column among `keys`, number of keys) for each range of `run`."""
    position = run.first
    for start, stop in run.keys:
        column = 0
        for first, last in keys:
            if first <= start < last:
                yield position, column + start - first, stop - start
                break
            column += last - first
        position += stop - start


def _after(ranges: Ranges, count: int) -> Ranges:
    """`ranges` without their first `count` tokens."""
    kept = []
    for start, stop in ranges:
        skipped = min(count, stop - start)
        count -= skipped
        if start + skipped < stop:
            kept.append((start + skipped, stop))
    return tuple(kept)


def _union(ranges: Ranges) -> Ranges:
    """The tokens of any of `ranges`, in the order of the row."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return tuple(joined)


def _length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _padded(count: int) -> int:
    return -(-count // LANES) * LANES


# -- one block -----------------------------------------------------------------------------------------------------------


def _probabilities(rows: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    """[H_kv, G * Q, K] of rows [H_kv, G * Q, D] and keys [H_kv, K, D]."""
    scores = torch.baddbmm(rows.new_empty(()), rows, keys.transpose(1, 2), beta=0, alpha=scaling)
    scores.unflatten(1, (-1, len(mask))).add_(mask)
    return torch.softmax(scores, dim=-1)


def _keys_of(heads: torch.Tensor, block: _Block) -> torch.Tensor:
    """The block's keys or values [H_kv, K, D] of `heads` [H_kv, T, D]; a view if they are side by side."""
    width, (start, stop) = block.mask.shape[1], block.keys[0]
    if stop - start == width:
        return heads[:, start:stop]
    out = heads.new_empty(len(heads), width, heads.shape[2])
    column = 0
    for start, stop in block.keys:
        out[:, column : column + stop - start] = heads[:, start:stop]
        column += stop - start
    out[:, column:] = 0
    return out


def _rows(heads: torch.Tensor, block: _Block, shared: int) -> torch.Tensor:
    """The block's tokens as rows [H_kv, G * Q, D], with the query heads of a key head one after the other."""
    return heads[:, block.start : block.stop].reshape(shared, -1, heads.shape[2])


def _put_rows(heads: torch.Tensor, block: _Block, rows: torch.Tensor) -> None:
    """The inverse of `_rows`, into `heads` [H, T, D]."""
    heads[:, block.start : block.stop] = rows.view(len(heads), block.stop - block.start, heads.shape[2])


def _add_columns(heads: torch.Tensor, block: _Block, columns: torch.Tensor) -> None:
    """Add gradients [H_kv, K, D] of the block's keys to the gradients `heads` [H_kv, T, D] of the tokens."""
    column = 0
    for start, stop in block.keys:
        heads[:, start:stop] += columns[:, column : column + stop - start]
        column += stop - start
