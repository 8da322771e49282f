"""The paged key/value cache of the local engine, the layout that reads and fills it, and the allocation of its slots."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from posttrain.engines.local.cpu.kernel import PAGE, DecodingKernel
from posttrain.engines.local.paged_attention import DecodingAttention, Prefix, Segment, decoding_attention
from posttrain.models.attention import causal_attention
from posttrain.models.cpu.attention import AttentionSegment, MaskCache, attend_segments


class KeyValuePages:
    """Keys and values of all layers, each [pages, slots, H_kv, PAGE, D].

    Page p of slot s holds its tokens p x PAGE .. (p + 1) x PAGE - 1. The same page of neighboring slots is contiguous in
    memory, which makes products over many sequences fast. The number of pages grows by half at a time.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.pages = 0
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def reserve(self, tokens: int) -> None:
        """Grow the cache for sequences of up to `tokens` tokens."""
        needed = -(-tokens // PAGE)
        if needed <= self.pages:
            return
        self.pages = max(needed, self.pages + self.pages // 2)
        for store in (self.keys, self.values):
            for layer, old in store.items():
                store[layer] = self._empty(old.shape[2], old)
                store[layer][: len(old)] = old

    def write(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values [T, H_kv, D] at `rows` [T x H_kv] int64, indices of cache rows of D numbers."""
        keys, values = self.layer(layer, key)
        keys.flatten(0, 3).index_copy_(0, rows, key.flatten(0, 1))
        values.flatten(0, 3).index_copy_(0, rows, value.flatten(0, 1))

    def layer(self, layer: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, allocated on first use for heads like those of `like` [T, H_kv, D]."""
        if layer not in self.keys:
            self.keys[layer], self.values[layer] = (self._empty(like.shape[1], like) for _ in range(2))
        return self.keys[layer], self.values[layer]

    def rows(self, segments: Sequence[Segment], heads: int) -> torch.Tensor:
        """[T x H_kv] int64: the cache rows of the tokens of `segments`, for `heads` key heads."""
        starts = torch.tensor([s.start for s in segments])
        counts = torch.tensor([s.count for s in segments])
        within = torch.arange(int(counts.sum())) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        positions = torch.repeat_interleave(starts, counts) + within
        slots = torch.repeat_interleave(torch.tensor([s.slot for s in segments]), counts)
        first = (positions // PAGE * self.slots + slots) * heads
        return ((first[:, None] + torch.arange(heads)) * PAGE + (positions % PAGE)[:, None]).flatten()

    def tokens(self, store: torch.Tensor, slot: int, count: int) -> torch.Tensor:
        """A copy [H_kv, count, D] of the first `count` keys or values of a slot."""
        pages = -(-count // PAGE)
        return store[:pages, slot].transpose(0, 1).flatten(1, 2)[:, :count]

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        """Copy the pages with the first `tokens` tokens from slot `source` to slot `target`."""
        pages = -(-tokens // PAGE)
        for store in (self.keys, self.values):
            for rows in store.values():
                rows[:pages, target] = rows[:pages, source]

    def swap(self, one: int, other: int, tokens: int) -> None:
        """Swap the pages with the first `tokens` tokens of two slots."""
        pages = -(-tokens // PAGE)
        for store in (self.keys, self.values):
            for rows in store.values():
                rows[:pages, [one, other]] = rows[:pages, [other, one]]

    def _empty(self, heads: int, like: torch.Tensor) -> torch.Tensor:
        # Zeros: masked entries are still multiplied, so they must be finite.
        return like.new_zeros(self.pages, self.slots, heads, PAGE, like.shape[-1])


class CachedLayout:
    """A layout of new tokens of many sequences in one row. Each sequence sees its cached tokens and, causally, itself.

    Segments of one token (decoding) come first, ordered by slot, and are computed together. Longer segments (prompts) are
    computed one by one. Prefixes that decoding sequences share are read once.
    """

    def __init__(self, cache: KeyValuePages, segments: Sequence[Segment], device: torch.device) -> None:
        self.cache = cache
        self.device = device
        self.singles = sorted((s for s in segments if s.count == 1), key=lambda s: s.slot)
        self.longer = [s for s in segments if s.count > 1]
        cache.reserve(max(s.start + s.count for s in segments))
        self._rows: dict[int, torch.Tensor] = {}
        self._first_rows: torch.Tensor | None = None
        self._decoding: dict[int | None, DecodingAttention] = {}
        self._masks = MaskCache()

    @property
    def segments(self) -> list[Segment]:
        """The segments in row order."""
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
        query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        return self.attend_tokens(layer, query, key, value, scaling, window).transpose(0, 1)

    def attend_tokens(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """`attend` with tokens first: `query` [T, H, D], `key` and `value` [T, H_kv, D]; returns [T, H, D]."""
        self.cache.write(layer, self._rows_of(key.shape[1]), key, value)
        return self._attention(layer, query, key, value, scaling, window)

    def attend_fused(
        self,
        layer: int,
        heads: torch.Tensor,
        kv_heads: int,
        kernel: DecodingKernel,
        angles: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        epsilon: float,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """`attend_tokens` for heads before head norms and rotary positions, which `kernel` applies in place.

        `heads` [T, H + 2 H_kv, D], contiguous: queries, keys and values, with H_kv = `kv_heads`; overwritten. `angles`,
        `norms` and `epsilon` as in `DecodingKernel.rotate_and_store`. Returns [T, H, D].
        """
        queries = heads.shape[1] - 2 * kv_heads
        key, value = heads[:, queries : queries + kv_heads], heads[:, queries + kv_heads :]
        if self._first_rows is None:
            self._first_rows = self._rows_of(kv_heads)[::kv_heads].contiguous()
        kernel.rotate_and_store(heads, angles, norms, epsilon, self.cache.layer(layer, key), self._first_rows)
        return self._attention(layer, heads[:, :queries], key, value, scaling, window)

    def _attention(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """Attention over the cache, which already contains the new tokens."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        offset = len(self.singles)
        outputs = []
        if offset:
            # Query heads that share a key head become rows of one small matrix, so keys are not repeated.
            rows = query[:offset].unflatten(1, (key.shape[1], -1))
            outputs.append(self._decoding_attention(window, rows)(keys, values, rows, scaling).flatten(1, 2))
        for segment in self.longer:
            span = slice(offset, offset + segment.count)
            offset = span.stop
            queries, seen_keys, seen_values = (part[span].transpose(0, 1) for part in (query, key, value))
            if segment.start:
                seen = segment.start + segment.count
                seen_keys, seen_values = (self.cache.tokens(store, segment.slot, seen) for store in (keys, values))
            outputs.append(self._prefill(queries, seen_keys, seen_values, scaling, window).transpose(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _rows_of(self, heads: int) -> torch.Tensor:
        if heads not in self._rows:
            self._rows[heads] = self.cache.rows(self.segments, heads).to(self.device)
        return self._rows[heads]

    def _prefill(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, window: int | None
    ) -> torch.Tensor:
        """Attention [H, Q, D] of the last Q of K positions: `query` [H, Q, D], `key` and `value` [H_kv, K, D]."""
        if query.device.type != "cpu":
            return causal_attention(query, key, value, scaling, window)
        before = key.shape[1] - query.shape[1]
        if before:
            query = torch.cat([query.new_empty(len(query), before, query.shape[2]), query], dim=1)
        segment = AttentionSegment(before, key.shape[1], 0, before)
        return attend_segments(query, key, value, [segment], scaling, window, self._masks)[:, before:]

    def _decoding_attention(self, window: int | None, rows: torch.Tensor) -> DecodingAttention:
        """The attention of the decoding rows. With a window, prefixes are not shared: it may hide parts of them."""
        if window is not None and window > max(s.start for s in self.singles):
            window = None
        if window not in self._decoding:
            self._decoding[window] = decoding_attention(self.singles, window, rows)
        return self._decoding[window]


MIN_PENDING_TOKENS = 16
"""Prompt tokens that another sequence must be computing before a request waits for them."""
PREFIX_SLACK = 64
"""Tokens by which two slots may share more than a known prefix and still be counted as sharing just that prefix."""


@dataclass
class Slot:
    """One sequence of the cache."""

    ids: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Token ids whose keys and values are cached."""
    busy: bool = False
    """Whether a running sequence uses the slot."""
    last_used: int = -1
    prefix: Prefix | None = None
    """A prefix of `ids` that other slots hold too."""


@dataclass(frozen=True)
class Placement:
    """The slot of a prompt, and the slot `source` that holds its first `shared` tokens."""

    slot: int
    source: int
    shared: int


class Slots:
    """Allocation of the cache's slots to sequences."""

    def __init__(self, count: int) -> None:
        self.slots = [Slot() for _ in range(count)]

    def __getitem__(self, index: int) -> Slot:
        return self.slots[index]

    @property
    def free(self) -> list[int]:
        """Indices of the slots that no sequence uses."""
        return [i for i, slot in enumerate(self.slots) if not slot.busy]

    def invalidate(self) -> None:
        """Discard all cached tokens."""
        for slot in self.slots:
            slot.ids, slot.prefix = np.empty(0, dtype=np.int64), None

    def place(self, prompt: np.ndarray, pending: int) -> Placement | None:
        """The placement that leaves least of `prompt` [T] int64 to compute.

        `pending`: first tokens of the prompt that a running sequence is about to compute. Returns None if no slot is
        free, or if waiting for the pending tokens saves enough.
        """
        free = self.free
        if not free:
            return None
        # The last token is always computed: its output predicts the first sampled token.
        cached = [common_prefix(slot.ids, prompt[:-1]) for slot in self.slots]
        source = int(np.argmax(cached))
        shared = cached[source]
        if pending >= shared + MIN_PENDING_TOKENS:
            return None
        # A slot that holds just this prefix is an earlier turn or the same prompt: continue there. Otherwise take the
        # least recently used slot.
        in_place = [i for i in free if cached[i] == shared > 0 and len(self.slots[i].ids) - shared <= 1]
        target = in_place[0] if in_place else min(free, key=lambda i: (self.slots[i].last_used, i))
        return Placement(target, target if cached[target] == shared else source, shared)

    def acquire(self, placement: Placement, prompt: np.ndarray, clock: int) -> None:
        """Mark the slot as used by a sequence; its shared tokens count as cached."""
        slot, source = self.slots[placement.slot], self.slots[placement.source]
        if slot is not source:
            slot.prefix = self._common(source, placement.shared)
        elif slot.prefix is not None and slot.prefix.tokens > placement.shared:
            slot.prefix = None
        slot.ids, slot.busy, slot.last_used = prompt[: placement.shared], True, clock

    def release(self, index: int, ids: np.ndarray, clock: int) -> None:
        """Free the slot. Its cached tokens `ids` stay, for the episode's next turn or another prompt."""
        slot = self.slots[index]
        slot.ids, slot.busy, slot.last_used = ids, False, clock

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Pairs (free, busy) of slots to swap so that the busy slots come first."""
        busy = [i for i, slot in enumerate(self.slots) if slot.busy]
        free = [i for i in range(len(busy)) if not self.slots[i].busy]
        return zip(free, reversed(busy), strict=False)

    def swap(self, one: int, other: int) -> None:
        """Swap the contents of two slots."""
        self.slots[one], self.slots[other] = self.slots[other], self.slots[one]

    def _common(self, source: Slot, shared: int) -> Prefix | None:
        """The prefix mark of a slot that has `shared` tokens in common with `source`."""
        known = source.prefix
        if known is not None and 0 <= shared - known.tokens <= PREFIX_SLACK:
            return known
        if shared < MIN_PENDING_TOKENS:
            return None
        prefix = Prefix(shared)
        if known is None or known.tokens < shared:
            source.prefix = prefix
        return prefix


def common_prefix(ids: np.ndarray, prompt: np.ndarray) -> int:
    """Number of leading tokens that two id arrays share."""
    length = min(len(ids), len(prompt))
    if length == 0 or ids[0] != prompt[0]:
        return 0
    differs = ids[:length] != prompt[:length]
    first = int(differs.argmax())
    return first if differs[first] else length
