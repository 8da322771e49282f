"""Exact attention on a CPU with a custom backward pass: that of PyTorch costs several times its matrix products.

Queries are processed in blocks, each against the keys up to its end, so most of the upper triangle is skipped. The
query heads that share a key head are rows of one matrix product. Only queries, keys and values are kept for the
backward pass, which recomputes the probabilities as FlashAttention does (Dao et al. 2022, arXiv 2205.14135), so memory
is linear in the number of tokens.

`attention.cpp` computes the same where it is faster: a block's products are small, and torch needs longer between them.
"""

import ctypes
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from posttrain.models.cpu.compiler import TYPES, compiled
from posttrain.models.layers import RowSegment

BLOCK = 128
"""Queries per block: short enough to skip unseen keys, long enough for the matrix units."""
LANES = 32
"""Keys are padded to a multiple of this: softmax kernels take about twice as long on rows of other lengths."""
MOST_KEYS = 1024
"""Keys of a segment in 16 bits from which on torch's products in 16 bits are faster than compiled ones in float32."""
SOURCE = Path(__file__).with_name("attention.cpp")


class _Block(NamedTuple):
    """Queries [start, stop) of the row and the columns [first, last) of the segment's keys that they may see."""

    start: int
    stop: int
    first: int
    last: int
    mask: torch.Tensor
    """[G * (stop - start), last - first]: 0 if a query sees a key, minus infinity elsewhere."""


class MaskCache:
    """Attention masks and tables of segments of one layout, shared by all layers."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], torch.Tensor] = {}
        self._tables: dict[tuple[RowSegment, ...], _Segments] = {}

    def segments(self, segments: Sequence[RowSegment]) -> "_Segments":
        """`segments` for the compiled functions."""
        if (key := tuple(segments)) not in self._tables:
            self._tables[key] = _Segments(key)
        return self._tables[key]

    def __call__(
        self, queries: int, ahead: int, columns: int, window: int | None, groups: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """The mask [G * queries, columns] for queries at columns `ahead`, `ahead` + 1, ... of `columns` keys."""
        key = (queries, ahead, columns, window, groups, dtype)
        if key not in self._kept:
            position, column = torch.arange(ahead, ahead + queries)[:, None], torch.arange(columns)[None]
            hidden = column > position
            if window is not None:
                hidden |= column <= position - window
            mask = torch.zeros(queries, columns, dtype=dtype).masked_fill_(hidden, float("-inf"))
            self._kept[key] = mask.repeat(groups, 1)
        return self._kept[key]


class _SegmentAttention(torch.autograd.Function):
    """Attention outputs [H, T, D] of `query` [H, T, D] over `key` and `value` [H_kv, T, D]. `segments` cover every
    token once. Scores have the dtype of `query`; softmax and sums are in float32 or wider."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: Sequence[RowSegment],
        scaling: float,
        window: int | None,
        masks: MaskCache,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.how = (segments, scaling, window, masks)
        heads, tokens, width = query.shape
        if (kernel := _kernel(query, key, value, masks.segments(segments))) is not None:
            return kernel.forward((query, key, value), masks.segments(segments), scaling, window)
        # Token-major memory layout, as the output projection reads it.
        out = query.new_empty(tokens, heads, width).transpose(0, 1)
        for segment in segments:
            keys, values = _keys_of(key, segment), _keys_of(value, segment)
            for block in _blocks(segment, window, heads // len(key), query.dtype, masks):
                seen = slice(block.first, block.last)
                probabilities = _probabilities(_rows(query, block, len(key)), keys[:, seen], block.mask, scaling)
                _put_rows(out, block, torch.bmm(probabilities, values[:, seen]))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        segments, scaling, window, masks = ctx.how
        if (kernel := _kernel(query, key, value, masks.segments(segments))) is not None:
            gradients = kernel.backward((query, key, value), gradient, masks.segments(segments), scaling, window)
            return *gradients, None, None, None, None
        heads, tokens, width = query.shape
        shared = len(key)
        query_gradient = query.new_empty(tokens, heads, width).transpose(0, 1)
        # Several blocks and continuations add to the same keys, so sum in float32.
        wide = torch.float32 if query.dtype in (torch.bfloat16, torch.float16) else query.dtype
        key_gradient, value_gradient = (
            torch.zeros(tokens, shared, width, dtype=wide).transpose(0, 1) for _ in range(2)
        )
        unused = query.new_empty(())
        for segment in segments:
            keys, values = _keys_of(key, segment), _keys_of(value, segment)
            for block in _blocks(segment, window, heads // shared, query.dtype, masks):
                seen = slice(block.first, block.last)
                rows, above = _rows(query, block, shared), _rows(gradient, block, shared)
                probabilities = _probabilities(rows, keys[:, seen], block.mask, scaling)
                _add_columns(value_gradient, segment, block, torch.bmm(probabilities.transpose(1, 2), above))
                grad_probabilities = torch.bmm(above, values[:, seen].transpose(1, 2))
                grad_scores = torch._softmax_backward_data(grad_probabilities, probabilities, -1, query.dtype)
                grad_rows = torch.baddbmm(unused, grad_scores, keys[:, seen], beta=0, alpha=scaling)
                _put_rows(query_gradient, block, grad_rows)
                grad_keys = torch.baddbmm(unused, grad_scores.transpose(1, 2), rows, beta=0, alpha=scaling)
                _add_columns(key_gradient, segment, block, grad_keys)
        return query_gradient, key_gradient.to(key.dtype), value_gradient.to(value.dtype), None, None, None, None


attend_segments = _SegmentAttention.apply
"""Query, key, value, segments, scaling, window, `MaskCache` -> outputs, as `_SegmentAttention` computes them."""


def _blocks(
    segment: RowSegment, window: int | None, groups: int, dtype: torch.dtype, masks: MaskCache
) -> Iterator[_Block]:
    seen = segment.seen
    for start in range(segment.start, segment.stop, BLOCK):
        stop = min(start + BLOCK, segment.stop)
        ahead = seen + start - segment.start
        first = 0 if window is None else max(0, ahead - window + 1) // LANES * LANES
        last = _padded(ahead + stop - start)
        yield _Block(start, stop, first, last, masks(stop - start, ahead - first, last - first, window, groups, dtype))


def _probabilities(rows: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    """[H_kv, G * Q, K] of rows [H_kv, G * Q, D] and keys [H_kv, K, D]."""
    return torch.softmax(torch.baddbmm(mask, rows, keys.transpose(1, 2), alpha=scaling), dim=-1)


def _padded(count: int) -> int:
    return -(-count // LANES) * LANES


def _keys_of(heads: torch.Tensor, segment: RowSegment) -> torch.Tensor:
    """Keys or values that the segment sees, in the stream's order, zero-padded: [H_kv, K, D] from `heads` [H_kv, T, D]."""
    out = heads.new_empty(len(heads), _padded(segment.seen + segment.stop - segment.start), heads.shape[2])
    column = 0
    for start, stop in segment.keys:
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


def _add_columns(heads: torch.Tensor, segment: RowSegment, block: _Block, columns: torch.Tensor) -> None:
    """Add gradients [H_kv, last - first, D] of the block's columns to those of the tokens, `heads` [H_kv, T, D]."""
    column = -block.first
    for start, stop in (*segment.before, (segment.start, block.stop)):
        first = max(0, -column)
        if first < stop - start:
            heads[:, start + first : stop] += columns[:, column + first : column + stop - start]
        column += stop - start


# -- the compiled functions ----------------------------------------------------------------------------------------------

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class _Heads(ctypes.Structure):
    _fields_ = [("base", _POINTER), ("head", _SIZE), ("token", _SIZE)]


class _Shape(ctypes.Structure):
    _fields_ = [*((name, _SIZE) for name in ("heads", "shared", "width", "window")), ("scaling", ctypes.c_float)]


class _Segments:
    """Segments as tables."""

    def __init__(self, segments: Sequence[RowSegment]) -> None:
        keys = [np.concatenate([np.arange(*span) for span in segment.keys]) for segment in segments]
        starts = np.cumsum([0, *map(len, keys)])[:-1].tolist()
        rows = [(one.start, one.stop, one.seen, start) for one, start in zip(segments, starts, strict=True)]
        self.rows, self.keys = np.array(rows, dtype=np.int64), np.concatenate(keys).astype(np.int64)
        self.longest = max(map(len, keys))
        self.apart = not any(segment.before for segment in segments)

    @property
    def arguments(self) -> tuple[int, int, int]:
        return self.rows.ctypes.data, len(self.rows), self.keys.ctypes.data


class _Kernel:
    """The compiled functions for one dtype."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.columns = library.columns()
        self._forward, self._backward = library.forward, library.backward
        self._forward.argtypes = [*[_POINTER] * 2, _SIZE, *[_POINTER] * 5, ctypes.c_int]
        self._backward.argtypes = [*[_POINTER] * 2, _SIZE, *[_POINTER] * 8, ctypes.c_int, ctypes.c_int]
        self._forward.restype = self._backward.restype = None

    def forward(
        self, inputs: Sequence[torch.Tensor], segments: _Segments, scaling: float, window: int | None
    ) -> torch.Tensor:
        """Outputs for query, key and value."""
        heads, tokens, width = inputs[0].shape
        out = inputs[0].new_empty(tokens, heads, width).transpose(0, 1)
        shape = _Shape(heads, len(inputs[1]), width, window or 0, scaling)
        every = [ctypes.byref(_Heads(part.data_ptr(), *part.stride()[:2])) for part in (*inputs, out)]
        self._forward(ctypes.byref(shape), *segments.arguments, *every, torch.get_num_threads())
        return out

    def backward(
        self,
        inputs: Sequence[torch.Tensor],
        above: torch.Tensor,
        segments: _Segments,
        scaling: float,
        window: int | None,
    ) -> tuple[torch.Tensor, ...]:
        """Gradients of query, key and value, from those of the outputs."""
        (heads, tokens, width), key = inputs[0].shape, inputs[1]
        above = above if above.stride(-1) == 1 else above.contiguous()
        gradient = inputs[0].new_empty(tokens, heads, width).transpose(0, 1)
        sums = [torch.zeros(tokens, len(key), width) for _ in range(2)]
        shape = _Shape(heads, len(key), width, window or 0, scaling)
        every = [ctypes.byref(_Heads(part.data_ptr(), *part.stride()[:2])) for part in (*inputs, above, gradient)]
        pointers = [part.data_ptr() for part in sums]
        self._backward(
            ctypes.byref(shape), *segments.arguments, *every, *pointers, segments.apart, torch.get_num_threads()
        )
        return gradient, *(part.transpose(0, 1).to(key.dtype) for part in sums)


@functools.lru_cache
def _library(dtype: torch.dtype) -> _Kernel | None:
    if dtype not in TYPES or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    library = compiled("attention", SOURCE, [f"-DTYPE_BF16={TYPES[dtype]}"])
    return None if library is None else _Kernel(ctypes.CDLL(str(library)))


def _kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: _Segments) -> _Kernel | None:
    """The compiled functions if they can compute this attention and are faster than torch."""
    kernel = _library(query.dtype) if query.is_cpu else None
    if kernel is None or query.shape[-1] % kernel.columns or key.dtype != query.dtype or value.dtype != query.dtype:
        return None
    if query.dtype != torch.float32 and segments.longest > MOST_KEYS:
        return None
    return kernel if all(part.stride(-1) == 1 for part in (query, key, value)) else None
