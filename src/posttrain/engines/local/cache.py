"""The paged key/value cache of the local engine, and the attention of a forward pass that fills and reads it.

A pass has new tokens of many sequences (`CachedLayout`). The compiled kernel attends to the tokens of decoding sequences and
of short prompts in one call. Without it, torch attends to prompts one by one, and to decoding sequences together by matrix
products over blocks, one page of neighboring slots each. Either way, pages that several slots share are read once.
"""

import ctypes
import math
import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from posttrain.engines.local.cpu.kernel import PAGE, DecodingKernel, decoding_kernel
from posttrain.models.cpu.attention import MaskCache, attend_segments
from posttrain.models.forward import upload
from posttrain.models.layers import Heads, RowSegment, causal_attention

_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None
"""On other systems memory cannot be returned, so the whole cache is allocated at once."""
ID = 8
"""Bytes of a token id."""
MIN_SAVED_TOKENS = 512
"""Cached tokens that sharing a prefix must save before its pages are attended separately."""
MOST_PAIRS = 2**16
"""Pairs of a query and a key of a prompt that the compiled kernel attends to. With more, matrix products are faster on
processors with matrix units."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """The first `tokens` tokens that several slots have in common; the same object marks the same tokens."""

    tokens: int


@dataclass(slots=True, eq=False)  # not frozen: one is made per sequence and pass
class Segment:
    """New tokens of one sequence in a forward pass: positions start .. start + count - 1 of `slot`."""

    slot: int
    start: int
    count: int
    prefix: Prefix | None = None
    """The prefix that the sequence shares with others; not longer than `start`."""
    length: int = 0
    """The length that decides the rotary frequencies of its tokens (`models.layers.Lengths.of`)."""

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key that it attends to."""
        return self.count * self.start + self.count * (self.count + 1) // 2


def positions_of(segments: Sequence[Segment]) -> np.ndarray:
    """The positions [T] int64 of the tokens of `segments`."""
    starts, counts = np.array([(s.start, s.count) for s in segments], dtype=np.int64).T
    ends = counts.cumsum()
    return np.arange(ends[-1]) + np.repeat(starts + counts - ends, counts)


def longest_prefix(sequences: Sequence[bytes], prompt: bytes) -> tuple[int, int]:
    """The first of `sequences` that begins with the most tokens of `prompt`, and their number; all as in `Slot.ids`."""
    best, shared, more = 0, 0, prompt[:ID]
    for index, ids in enumerate(sequences):
        if more and ids.startswith(more):  # most sequences share less than the best so far
            length = min(len(ids), len(prompt)) // ID
            differs = np.frombuffer(ids, np.int64, length) != np.frombuffer(prompt, np.int64, length)
            best, shared = index, int(differs.argmax()) if differs.any() else length
            more = prompt[: ID * (shared + 1)] if ID * shared < len(prompt) else b""
    return best, shared


# -- pages ------------------------------------------------------------------------------------------------------------


class KeyValuePages:
    """Keys and values of all layers, each [pages, slots, H_kv, PAGE, D].

    Page p of slot s holds its tokens p x PAGE .. (p + 1) x PAGE - 1. The same page of neighboring slots is contiguous
    in memory, which makes products over many sequences fast. The number of pages grows by half at a time.

    On a CPU the tensors reserve addresses only: the system provides the memory of a page when tokens are written to it,
    and `drop` returns it.
    """

    def __init__(self, slots: int, most_pages: int | None = None) -> None:
        """`most_pages`: pages of the longest sequence, beyond which the cache does not grow."""
        self.slots = slots
        self.most_pages = most_pages
        self.pages = 0
        self.resident = np.zeros(slots, dtype=np.int64)
        """Pages of each slot that occupy memory: always the first ones."""
        self._written = np.zeros(slots, dtype=np.int64)
        """Pages of each slot that were written since the last `trim`."""
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self._page_bytes = 0
        """Bytes of a page of one slot, of all layers."""

    def reserve(self, tokens: int) -> None:
        """Grow the cache for sequences of up to `tokens` tokens."""
        needed = -(-tokens // PAGE)
        if needed <= self.pages:
            return
        self.pages = max(needed, min(self.pages + self.pages // 2, self.most_pages or sys.maxsize))
        for store in (self.keys, self.values):
            for layer, old in store.items():
                store[layer] = self._grow(old)

    @property
    def bytes(self) -> int:
        """Bytes of memory that the cache occupies."""
        return int(self.resident.sum()) * self._page_bytes

    @property
    def _stores(self) -> list[torch.Tensor]:
        return [*self.keys.values(), *self.values.values()]

    def fill(self, slots: int | np.ndarray, tokens: int | np.ndarray) -> None:
        """Count the pages with the first `tokens` tokens of a slot as occupied, or of several different ones."""
        pages = -(-tokens // PAGE)
        for count in (self.resident, self._written):
            count[slots] = np.maximum(count[slots], pages)

    def drop(self, slot: int, pages: int = 0) -> None:
        """Return the memory of a slot beyond its first `pages` pages to the system."""
        for store in self._stores:
            if store.device.type != "cpu" or _LIBRARY is None:
                break
            for page in range(pages, int(self.resident[slot])):
                # Only whole pages of the system inside the tensor, which are zero afterwards: its neighbors are in use.
                memory = store[page, slot]
                start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
                size = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
                if size > 0:
                    _LIBRARY.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
        self.resident[slot] = min(self.resident[slot], pages)
        self._written[slot] = min(self._written[slot], pages)

    def trim(self) -> None:
        """Drop the pages that were not written since the last call, if any were."""
        if self._written.any():
            for slot, pages in enumerate(self._written):
                self.drop(slot, int(pages))
            self._written[:] = 0

    def write(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values [T, H_kv, D] at `rows` [T x H_kv] int64, indices of cache rows of D numbers."""
        keys, values = self.layer(layer, key, value)
        keys.flatten(0, 3).index_copy_(0, rows, key.flatten(0, 1))
        values.flatten(0, 3).index_copy_(0, rows, value.flatten(0, 1))

    def layer(
        self, layer: int, like: torch.Tensor, value: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, allocated on first use for heads like `like` [T, H_kv, D] and values like `value`."""
        if layer not in self.keys:
            self.keys[layer] = self._empty(like.shape[1], like)
            self.values[layer] = self._empty(like.shape[1], like if value is None else value)
            self._page_bytes += (self.keys[layer].nbytes + self.values[layer].nbytes) // (self.pages * self.slots)
        return self.keys[layer], self.values[layer]

    def rows(self, segments: Sequence[Segment], heads: int) -> torch.Tensor:
        """[T x H_kv] int64: the cache rows of the tokens of `segments`, for `heads` key heads."""
        positions = positions_of(segments)
        slots = np.repeat([s.slot for s in segments], [s.count for s in segments])
        first = (positions // PAGE * self.slots + slots) * heads
        return torch.from_numpy(((first[:, None] + np.arange(heads)) * PAGE + (positions % PAGE)[:, None]).ravel())

    def tokens(self, store: torch.Tensor, slot: int, count: int) -> torch.Tensor:
        """A copy [H_kv, count, D] of the first `count` keys or values of a slot."""
        pages = -(-count // PAGE)
        return store[:pages, slot].transpose(0, 1).flatten(1, 2)[:, :count]

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        """Copy the pages with the first `tokens` tokens from slot `source` to slot `target`."""
        pages = -(-tokens // PAGE)
        self.fill(target, tokens)
        for store in self._stores:
            store[:pages, target] = store[:pages, source]

    def swap(self, one: int, other: int, tokens: int) -> None:
        """Swap the pages with the first `tokens` tokens of two slots."""
        pages = -(-tokens // PAGE)
        self.fill(one, tokens)
        self.fill(other, tokens)
        for store in self._stores:
            store[:pages, [one, other]] = store[:pages, [other, one]]

    def _grow(self, old: torch.Tensor) -> torch.Tensor:
        new = self._empty(old.shape[2], old)
        for page in range(min(len(old), int(self.resident.max(initial=0)))):
            occupied = torch.from_numpy(np.flatnonzero(self.resident > page)).to(old.device)
            new[page, occupied] = old[page, occupied]
        return new

    def _empty(self, heads: int, like: torch.Tensor) -> torch.Tensor:
        # Zeros: masked entries are still multiplied, so they must be finite.
        shape = (self.pages, self.slots, heads, PAGE, like.shape[-1])
        if like.device.type != "cpu" or _LIBRARY is None:
            return like.new_zeros(shape)
        # Anonymous memory is zero, and occupies none before it is written.
        region = mmap.mmap(-1, math.prod(shape) * like.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(region, dtype=like.dtype).view(shape)


# -- plan of decoding -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """One page of the neighboring slots first .. stop - 1."""

    page: int
    first: int
    stop: int


@dataclass(frozen=True)
class SharedPages:
    """Slots whose first `pages` pages contain the same tokens. The pages of the first slot are read for all of them."""

    slots: list[int]
    pages: int


@dataclass(frozen=True)
class Plan:
    """The memory that decoding reads: `shared` pages and `blocks`, in slots first .. stop - 1 and the first `pages` pages."""

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
    blocks: list[Block] = []
    for page in range(pages):
        slots = [
            s.slot
            for s in singles
            if skipped.get(s.slot, 0) <= page <= s.start // PAGE
            and (window is None or (page + 1) * PAGE > s.start + 1 - window)
        ]
        begun = len(blocks)
        for slot in slots:
            # Reading a gap of unneeded slots costs less than another product.
            if len(blocks) > begun and slot - blocks[-1].stop <= 8:
                blocks[-1] = Block(page, blocks[-1].first, slot + 1)
            else:
                blocks.append(Block(page, slot, slot + 1))
    return Plan(singles[0].slot, singles[-1].slot + 1, pages, blocks, shared)


def shared_pages(singles: Sequence[Segment]) -> list[SharedPages]:
    """Groups of slots with the same first pages, if reading those once saves enough tokens."""
    groups: dict[Prefix, list[int]] = {}
    for segment in singles:
        if segment.prefix is not None:
            groups.setdefault(segment.prefix, []).append(segment.slot)
    shared = [SharedPages(slots, prefix.tokens // PAGE) for prefix, slots in groups.items()]
    return [group for group in shared if (len(group.slots) - 1) * group.pages * PAGE >= MIN_SAVED_TOKENS]


# -- decoding attention -----------------------------------------------------------------------------------------------


PagedAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""`attend(keys, values, rows, scaling)`: attention of several segments of a pass over the cache, for all layers with one
window. Outputs [B, H_kv, G, D] for queries `rows` [B, H_kv, G, D]; keys and values [pages, slots, H_kv, PAGE, D]."""


class CompiledAttention:
    """Attends to each token separately. Sequences that share pages read the same ones, which stay in the CPU cache."""

    def __init__(self, kernel: DecodingKernel, segments: Sequence[Segment], window: int | None) -> None:
        self._kernel = kernel
        groups = shared_pages(segments) if window is None else []
        shared = {slot: (group.slots[0], group.pages) for group in groups for slot in group.slots}
        reads = np.array([(s.slot, *shared.get(s.slot, (s.slot, 0))) for s in segments], dtype=np.int64)
        stops = positions_of(segments) + 1
        firsts = np.zeros_like(stops) if window is None else np.maximum(0, stops - window)
        token_reads = np.repeat(reads, [s.count for s in segments], axis=0)
        self.rows = torch.from_numpy(np.column_stack([token_reads, firsts, stops]))

    def __call__(self, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, scaling: float) -> torch.Tensor:
        # Some models compute queries head by head.
        rows = rows if rows[0].is_contiguous() else rows.contiguous()
        return self._kernel.attend(rows, keys, values, self.rows, scaling)


class TorchDecodingAttention:
    """Attention of segments of one token by a `Plan`. It computes all slots from the first to the last decoding one, so
    that memory is contiguous. Rows of slots in between are computed and discarded."""

    def __init__(self, singles: Sequence[Segment], window: int | None, device: torch.device) -> None:
        plan = self.plan = plan_decoding(singles, window, share=window is None)
        self.span = plan.stop - plan.first
        slots = torch.tensor([s.slot - plan.first for s in singles])
        self._slots = slots.to(device) if len(singles) < self.span else None
        starts = torch.zeros(self.span, dtype=torch.int64)
        starts[slots] = torch.tensor([s.start for s in singles])
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
            # In bfloat16, a CPU multiplies the large matrix by the small one much faster than in the reverse order, which
            # first copies the large matrix into another layout.
            if page.dtype == torch.bfloat16:
                products = (page @ queries[local].transpose(2, 3)).transpose(2, 3)
            else:
                products = queries[local] @ page.transpose(2, 3)
            scores[local, ..., block.page * PAGE : (block.page + 1) * PAGE] = products
        for group, slots in self._groups:
            # All rows of the group with its shared pages, by one product per key head.
            stacked = queries[slots].transpose(0, 1).flatten(1, 2)
            common = keys[: group.pages, group.slots[0]].transpose(0, 1).flatten(1, 2)
            products = (stacked @ common.transpose(1, 2)).unflatten(1, (len(slots), groups)).transpose(0, 1)
            scores[slots, ..., : group.pages * PAGE] = products.float()
        weights = scores.masked_fill_(self._hidden, -torch.inf).softmax(-1).to(rows.dtype)
        out = rows.new_zeros(self.span, heads, groups, size)
        for group, slots in self._groups:
            stacked = weights[slots, ..., : group.pages * PAGE].transpose(0, 1).flatten(1, 2)
            common = values[: group.pages, group.slots[0]].transpose(0, 1).flatten(1, 2)
            out.index_add_(0, slots, (stacked @ common).unflatten(1, (len(slots), groups)).transpose(0, 1))
            # A block may include slots of the group; it must not add their shared pages again.
            weights[slots, ..., : group.pages * PAGE] = 0
        for block in self.plan.blocks:
            local = slice(block.first - first, block.stop - first)
            part = weights[local, ..., block.page * PAGE : (block.page + 1) * PAGE]
            out[local] += part @ values[block.page, block.first : block.stop]
        return out if self._slots is None else out[self._slots]


# -- the layout of a forward pass -------------------------------------------------------------------------------------


class CachedLayout:
    """A layout of new tokens of many sequences in one row. Each sequence sees its cached tokens and, causally, itself.

    Segments of one token (decoding) come first, ordered by slot, and are computed together. The compiled kernel also
    computes prompts together with them, up to `MOST_PAIRS` of query and key each. Other prompts are computed one by one.
    Prefixes that decoding sequences share are read once.
    """

    tokens: Sequence[np.ndarray] = ()
    """For each segment all tokens [start + count] int64 of its sequence, for models whose positions depend on them."""

    def __init__(self, cache: KeyValuePages, segments: Sequence[Segment], device: torch.device) -> None:
        self.cache = cache
        self.device = device
        self.singles = sorted((s for s in segments if s.count == 1), key=lambda s: s.slot)
        prompts = sorted((s for s in segments if s.count > 1), key=lambda s: s.pairs > MOST_PAIRS)
        self.short = [s for s in prompts if s.pairs <= MOST_PAIRS]
        self.longer = prompts[len(self.short) :]
        slots, stops = np.array([(s.slot, s.start + s.count) for s in segments]).T
        cache.reserve(int(stops.max()))
        cache.fill(slots, stops)
        self._rows: dict[int, torch.Tensor] = {}
        self._first_rows: torch.Tensor | None = None
        self._paged: dict[tuple[int | None, DecodingKernel | None], PagedAttention] = {}
        self._masks = MaskCache()

    @property
    def segments(self) -> list[Segment]:
        """The segments in row order."""
        return self.singles + self.short + self.longer

    def lengths(self) -> list[int] | None:
        """For each token the length that decides its rotary frequencies; None if it is 0 for all."""
        if not any(segment.length for segment in self.segments):
            return None
        return [segment.length for segment in self.segments for _ in range(segment.count)]

    def attend(self, layer: int, heads: Heads) -> torch.Tensor:
        query, key, value = (part.transpose(0, 1) for part in heads[:3])
        return self.attend_tokens(layer, Heads(query, key, value, *heads[3:])).transpose(0, 1)

    def attend_tokens(self, layer: int, heads: Heads) -> torch.Tensor:
        """`attend` with tokens first: `query` [T, H, D], `key` and `value` [T, H_kv, D]; returns [T, H, D]."""
        self.cache.write(layer, self._rows_of(heads.key.shape[1]), heads.key, heads.value)
        return self._attention(layer, heads)

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
        """`attend_tokens` for heads before head norms and rotary positions, which `kernel` applies in place. `heads`
        [T, H + 2 H_kv, D], contiguous: queries, keys and values, with H_kv = `kv_heads`; overwritten. `angles`, `norms`
        and `epsilon` as in `DecodingKernel.rotate_and_store`. Returns [T, H, D]."""
        queries = heads.shape[1] - 2 * kv_heads
        key, value = heads[:, queries : queries + kv_heads], heads[:, queries + kv_heads :]
        rows = self.first_rows(kv_heads)
        kernel.rotate_and_store(heads, angles, norms, epsilon, self.cache.layer(layer, key), rows)
        return self._attention(layer, Heads(heads[:, :queries], key, value, scaling, window))

    def _attention(self, layer: int, heads: Heads) -> torch.Tensor:
        """Attention [T, H, D] over the cache, which already contains the new tokens, of heads with tokens first."""
        query, key, value, scaling, window, bounds = heads
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        kv_heads = key.shape[1]
        usual = bounds is None and query.shape[2] == value.shape[2]
        kernel = None
        if usual and query.device.type == "cpu":
            kernel = decoding_kernel(query.dtype, query.shape[2], query.shape[1] // kv_heads)
        paged = self.singles if kernel is None else self.singles + self.short
        if not usual:
            paged = []
        offset = sum(s.count for s in paged)
        outputs = []
        if paged:
            # Query heads that share a key head become rows of one small matrix, so keys are not repeated.
            rows = query[:offset].unflatten(1, (kv_heads, -1))
            attend = self._paged_attention(kernel, paged, window)
            outputs.append(attend(keys, values, rows, scaling).flatten(1, 2))
        for segment in self.segments[len(paged) :]:
            span = slice(offset, offset + segment.count)
            offset = span.stop
            queries, seen_keys, seen_values = (part[span].transpose(0, 1) for part in (query, key, value))
            if segment.start:
                seen = segment.start + segment.count
                seen_keys, seen_values = (self.cache.tokens(store, segment.slot, seen) for store in (keys, values))
            if usual and query.device.type == "cpu":
                # `attend_segments` takes queries of all positions, of which it computes those of the segment.
                before = seen_keys.shape[1] - segment.count
                if before:
                    queries = torch.cat([queries.new_empty(len(queries), before, queries.shape[2]), queries], dim=1)
                row = RowSegment(before, seen_keys.shape[1], ((0, before),) if before else ())
                attended = attend_segments(queries, seen_keys, seen_values, [row], scaling, window, self._masks)
                attended = attended[:, before:]
            else:
                attended = causal_attention(Heads(queries, seen_keys, seen_values, scaling, window, bounds))
            outputs.append(attended.transpose(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def first_rows(self, kv_heads: int) -> torch.Tensor:
        """`rows` of `DecodingKernel.rotate_and_store` for all tokens and `kv_heads` key heads."""
        if self._first_rows is None:
            self._first_rows = self._rows_of(kv_heads)[::kv_heads].contiguous()
        return self._first_rows

    def kernel_rows(self, kernel: DecodingKernel, window: int | None) -> torch.Tensor:
        """`rows` of `DecodingKernel.attend` for all tokens but those of `longer` prompts."""
        attention = self._paged_attention(kernel, self.singles + self.short, window)
        assert isinstance(attention, CompiledAttention)
        return attention.rows

    def _rows_of(self, heads: int) -> torch.Tensor:
        if heads not in self._rows:
            self._rows[heads] = upload(self.cache.rows(self.segments, heads), self.device)
        return self._rows[heads]

    def _paged_attention(
        self, kernel: DecodingKernel | None, segments: Sequence[Segment], window: int | None
    ) -> PagedAttention:
        """The attention of `segments`. With a window, prefixes are not shared: it may hide parts of them."""
        if window is not None and window >= max(s.start + s.count for s in segments):
            window = None
        # Layers of a model can have heads of different sizes.
        if (window, kernel) not in self._paged:
            self._paged[window, kernel] = (
                TorchDecodingAttention(segments, window, self.device)
                if kernel is None
                else CompiledAttention(kernel, segments, window)
            )
        return self._paged[window, kernel]
