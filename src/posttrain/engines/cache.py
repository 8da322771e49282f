"""The key/value cache of the local engine: one slab, a row per sequence, and the layout that reads and fills it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from posttrain.models.attention import causal_attention


@dataclass(frozen=True)
class Segment:
    """New tokens of one sequence in a forward pass: positions start .. start + count - 1 of `slot`."""

    slot: int
    start: int
    count: int


class KeyValueSlab:
    """Keys and values of all layers: per layer [slots, H_kv, capacity, D], growing by doubling as sequences do."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.capacity = 0
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def reserve(self, tokens: int) -> None:
        """Make room for sequences of up to `tokens` tokens."""
        if tokens <= self.capacity:
            return
        self.capacity = max(tokens, 2 * self.capacity, 128)
        for store in (self.keys, self.values):
            for layer, old in store.items():
                store[layer] = self._empty(old)
                store[layer][:, :, : old.shape[2]] = old

    def write(self, layer: int, segment: Segment, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the keys and values [H_kv, count, D] of a segment."""
        if layer not in self.keys:
            self.keys[layer], self.values[layer] = self._empty(key[None]), self._empty(value[None])
        span = slice(segment.start, segment.start + segment.count)
        self.keys[layer][segment.slot, :, span] = key
        self.values[layer][segment.slot, :, span] = value

    def write_single(
        self, layer: int, slots: torch.Tensor, starts: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store one token for each of several sequences: keys and values [H_kv, B, D] at `starts` [B] of `slots` [B]."""
        self.keys[layer][slots, :, starts] = key.transpose(0, 1)
        self.values[layer][slots, :, starts] = value.transpose(0, 1)

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        """Give slot `target` the first `tokens` tokens of slot `source`."""
        for store in (self.keys, self.values):
            for rows in store.values():
                rows[target, :, :tokens] = rows[source, :, :tokens]

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self.slots, like.shape[1], self.capacity, like.shape[3])


class CachedLayout:
    """New tokens of many sequences in one row; each attends to its own cached past and, causally, to itself.

    Segments of one token (decoding) come first and are attended together; longer ones (prompts) one by one.
    """

    def __init__(self, slab: KeyValueSlab, segments: Sequence[Segment]) -> None:
        self.slab = slab
        self.singles = [s for s in segments if s.count == 1]
        self.longer = [s for s in segments if s.count > 1]
        slab.reserve(max(s.start + s.count for s in segments))
        self._slots = torch.tensor([s.slot for s in self.singles])
        self._starts = torch.tensor([s.start for s in self.singles])
        self._length = max((s.start + 1 for s in self.singles), default=0)
        self._masks: dict[int | None, torch.Tensor] = {}

    @property
    def segments(self) -> list[Segment]:
        """The segments in the order in which their tokens stand in the row."""
        return self.singles + self.longer

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        outputs = []
        offset = len(self.singles)
        for segment in self.longer:
            span = slice(offset, offset + segment.count)
            offset = span.stop
            self.slab.write(layer, segment, key[:, span], value[:, span])
            seen = segment.start + segment.count
            outputs.append(
                causal_attention(
                    query[:, span],
                    self.slab.keys[layer][segment.slot, :, :seen],
                    self.slab.values[layer][segment.slot, :, :seen],
                    scaling,
                    window,
                )
            )
        if self.singles:
            outputs.insert(0, self._decode(layer, query, key, value, scaling, window))
        return torch.cat(outputs, dim=1)

    def _decode(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        batch, kv_heads = len(self.singles), key.shape[0]
        if layer not in self.slab.keys:
            first = Segment(self.singles[0].slot, self.singles[0].start, 1)
            self.slab.write(layer, first, key[:, :1], value[:, :1])
        self.slab.write_single(layer, self._slots, self._starts, key[:, :batch], value[:, :batch])
        # The query heads that share a key head become rows of one small matrix, so nothing is repeated.
        rows = query[:, :batch].transpose(0, 1).reshape(batch, kv_heads, -1, query.shape[-1])
        out = scaled_dot_product_attention(
            rows,
            self.slab.keys[layer][self._slots, :, : self._length],
            self.slab.values[layer][self._slots, :, : self._length],
            attn_mask=self._mask(window),
            scale=scaling,
        )
        return out.reshape(batch, query.shape[0], -1).transpose(0, 1)

    def _mask(self, window: int | None) -> torch.Tensor:
        """[B, 1, 1, length] bool: which cached positions each decoding token sees."""
        if window not in self._masks:
            columns = torch.arange(self._length)
            seen = columns[None] <= self._starts[:, None]
            if window is not None:
                seen &= columns[None] > self._starts[:, None] - window
            self._masks[window] = seen[:, None, None]
        return self._masks[window]
