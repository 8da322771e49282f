"""The local engine on a GPU: the key/value cache, one call of the variable-length flash kernel for all sequences of a
forward pass, and running sums for sampling.

A slot is contiguous, so the kernel reads the keys of each sequence in place, for any length. Prompts and decoding
sequences are attended together. PyTorch's kernel does not support page tables without FlashAttention 3.
"""

from collections.abc import Sequence

import numpy as np
import torch

from posttrain.engines.local.cache import CachedLayout, KeyValuePages, Segment
from posttrain.engines.local.cpu.kernel import PAGE
from posttrain.errors import RunError
from posttrain.models.cuda.attention import Kernel, Spans, flash_over_cache
from posttrain.models.forward import upload

TERMS = 256
"""Numbers that `running_sum` adds by one product."""


class KeyValueRows(KeyValuePages):
    """Keys and values of all layers, each [slots, tokens, H_kv, D]."""

    @property
    def tokens_per_slot(self) -> int:
        return self.pages * PAGE

    @property
    def bytes(self) -> int:
        """Bytes of memory that the cache occupies."""
        return sum(store.nbytes for store in (*self.keys.values(), *self.values.values()))

    def _empty(self, heads: int, like: torch.Tensor) -> torch.Tensor:
        try:
            return like.new_empty(self.slots, self.tokens_per_slot, heads, like.shape[-1])
        except torch.OutOfMemoryError as error:
            raise RunError(
                f"the key/value cache of {self.slots} slots with {self.tokens_per_slot} tokens does not fit into the GPU's "
                "memory; lower engine.slots or rollout.tokens_per_episode"
            ) from error

    def _grow(self, old: torch.Tensor) -> torch.Tensor:
        new = self._empty(old.shape[2], old)
        new[:, : old.shape[1]] = old
        return new

    def write(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values [T, H_kv, D] at `rows` [T] int64."""
        for store, new in zip(self.layer(layer, key), (key, value), strict=True):
            store.flatten(0, 1).index_copy_(0, rows, new)

    def rows(self, segments: Sequence[Segment], heads: int) -> torch.Tensor:
        """[T] int64: the cache rows of the tokens of `segments`."""
        starts = [(s.slot * self.tokens_per_slot + s.start, s.count) for s in segments]
        return torch.from_numpy(np.concatenate([np.arange(start, start + count) for start, count in starts]))

    def tokens(self, store: torch.Tensor, slot: int, count: int) -> torch.Tensor:
        """A view [H_kv, count, D] of the first `count` keys or values of a slot."""
        return store[slot, :count].transpose(0, 1)

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens from slot `source` to slot `target`."""
        for store in (self.keys, self.values):
            for rows in store.values():
                rows[target, :tokens] = rows[source, :tokens]

    def swap(self, one: int, other: int, tokens: int) -> None:
        """Never called: sequences need not be neighbors, so the engine does not move them."""
        raise AssertionError("slots of a GPU's cache are not moved")


class FlashLayout(CachedLayout):
    """As `CachedLayout`, with segments ordered by slot."""

    def __init__(
        self, cache: KeyValueRows, segments: Sequence[Segment], device: torch.device, kernel: Kernel = flash_over_cache
    ) -> None:
        self._ordered = sorted(segments, key=lambda s: s.slot)
        super().__init__(cache, self._ordered, device)
        self._kernel = kernel
        self._spans: Spans | None = None

    @property
    def segments(self) -> list[Segment]:
        return self._ordered

    def _attention(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        keys, values = (store[layer].flatten(0, 1) for store in (self.cache.keys, self.cache.values))
        if self._spans is None:
            self._spans = cached_spans(self._ordered, len(keys) // self.cache.slots, self.device)
        return self._kernel(self._spans, query, keys, values, scaling, window)


def cached_spans(segments: Sequence[Segment], tokens_per_slot: int, device: torch.device) -> Spans:
    """The spans of segments whose keys are in the slots of a `KeyValueRows`."""
    counts = [segment.count for segment in segments]
    seen = [segment.start + segment.count for segment in segments]
    begins = [segment.slot * tokens_per_slot for segment in segments]
    return Spans(
        query_ends=upload(np.cumsum([0, *counts], dtype=np.int32), device),
        key_ends=upload(np.array([*begins, begins[-1] + tokens_per_slot], dtype=np.int32), device),
        longest_query=max(counts),
        longest_key=max(seen),
        gathered=None,
        keys_seen=upload(np.array(seen, dtype=np.int32), device),
    )


def running_sum(values: torch.Tensor) -> torch.Tensor:
    """Sums [..., N] of the first 1 to N numbers of each row of `values` [..., N], which are floating-point numbers.

    torch has no deterministic kernel for it on a GPU, so it is computed there by products with triangular matrices of
    ones: within blocks, and over the sums of the blocks before.
    """
    if not (values.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return values.cumsum(-1)
    return _by_products(values)


def _by_products(values: torch.Tensor) -> torch.Tensor:
    count = values.shape[-1]
    width = min(count, TERMS)
    whole = -(-count // width) * width
    blocks = torch.nn.functional.pad(values, (0, whole - count)).unflatten(-1, (-1, width))
    sums = blocks @ torch.ones(width, width, dtype=values.dtype, device=values.device).triu()
    if whole > width:
        ends = sums[..., -1]
        sums = sums + (_by_products(ends) - ends)[..., None]
    return sums.flatten(-2)[..., :count].contiguous()
