"""The key/value cache of the local engine: pages by slot, and the layout that reads and fills them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from posttrain.engines.local.cpu.kernel import DecodingKernel
from posttrain.engines.local.paged_attention import PAGE, Prefix, Reader, Segment, reader_of
from posttrain.models.attention import causal_attention
from posttrain.models.cpu.attention import AttentionSegment, MaskCache, attend_segments


class KeyValuePages:
    """Keys and values of all layers, each [pages, slots, H_kv, PAGE, D]: page p of slot s holds its tokens
    p x PAGE .. (p + 1) x PAGE - 1.

    A page of neighbouring slots is one piece of memory, which is what makes products over many sequences fast. The
    number of pages grows by half as sequences do.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.pages = 0
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def reserve(self, tokens: int) -> None:
        """Make room for sequences of up to `tokens` tokens."""
        needed = -(-tokens // PAGE)
        if needed <= self.pages:
            return
        self.pages = max(needed, self.pages + self.pages // 2)
        for store in (self.keys, self.values):
            for layer, old in store.items():
                store[layer] = self._empty(old.shape[2], old)
                store[layer][: len(old)] = old

    def write(self, layer: int, places: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values [T, H_kv, D] at `places` [T x H_kv], which are indices of rows of D numbers."""
        keys, values = self.of(layer, key)
        keys.flatten(0, 3).index_copy_(0, places, key.flatten(0, 1))
        values.flatten(0, 3).index_copy_(0, places, value.flatten(0, 1))

    def of(self, layer: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, whose heads are `like` [T, H_kv, D]."""
        if layer not in self.keys:
            self.keys[layer], self.values[layer] = (self._empty(like.shape[1], like) for _ in range(2))
        return self.keys[layer], self.values[layer]

    def places(self, segments: Sequence[Segment], heads: int) -> torch.Tensor:
        """[T x H_kv] int64: where `write` puts the tokens of `segments` in a cache of `heads` key heads."""
        starts = torch.tensor([s.start for s in segments])
        counts = torch.tensor([s.count for s in segments])
        within = torch.arange(int(counts.sum())) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        positions = torch.repeat_interleave(starts, counts) + within
        slots = torch.repeat_interleave(torch.tensor([s.slot for s in segments]), counts)
        first = (positions // PAGE * self.slots + slots) * heads
        return ((first[:, None] + torch.arange(heads)) * PAGE + (positions % PAGE)[:, None]).flatten()

    def tokens(self, store: torch.Tensor, slot: int, count: int) -> torch.Tensor:
        """[H_kv, count, D]: a copy of the first `count` keys or values of a slot."""
        pages = -(-count // PAGE)
        return store[:pages, slot].transpose(0, 1).flatten(1, 2)[:, :count]

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        """Give slot `target` the pages with the first `tokens` tokens of slot `source`."""
        pages = -(-tokens // PAGE)
        for store in (self.keys, self.values):
            for rows in store.values():
                rows[:pages, target] = rows[:pages, source]

    def swap(self, one: int, other: int, tokens: int) -> None:
        """Exchange the pages with the first `tokens` tokens of two slots."""
        pages = -(-tokens // PAGE)
        for store in (self.keys, self.values):
            for rows in store.values():
                rows[:pages, [one, other]] = rows[:pages, [other, one]]

    def _empty(self, heads: int, like: torch.Tensor) -> torch.Tensor:
        # Zeros, since what a mask hides is still multiplied, and must be finite.
        return like.new_zeros(self.pages, self.slots, heads, PAGE, like.shape[-1])


class CachedLayout:
    """New tokens of many sequences in one row; each attends to its own cached past and, causally, to itself.

    Segments of one token (decoding) come first, by slot, and are attended together; longer ones (prompts) one by one.
    What decoding sequences share is read once for all of them.
    """

    def __init__(self, cache: KeyValuePages, segments: Sequence[Segment], device: torch.device) -> None:
        self.cache = cache
        self.device = device
        self.singles = sorted((s for s in segments if s.count == 1), key=lambda s: s.slot)
        self.longer = [s for s in segments if s.count > 1]
        cache.reserve(max(s.start + s.count for s in segments))
        self._places: dict[int, torch.Tensor] = {}
        self._first_places: torch.Tensor | None = None
        self._readers: dict[int | None, Reader] = {}
        self._stretch_masks = MaskCache()

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
        """As `attend`, token by token: `query` [T, H, D], `key` and `value` [T, H_kv, D]; returns [T, H, D]."""
        self.cache.write(layer, self._places_of(key.shape[1]), key, value)
        return self._attended(layer, query, key, value, scaling, window)

    def attend_placed(
        self,
        layer: int,
        heads: torch.Tensor,
        keyed: int,
        kernel: DecodingKernel,
        angles: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        epsilon: float,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """As `attend_tokens` for queries, keys and values before their rotary positions, `heads` [T, H + 2 H_kv, D] in
        one piece with `keyed` = H_kv, which are used up; `kernel.place` says what the others are."""
        queries = heads.shape[1] - 2 * keyed
        key, value = heads[:, queries : queries + keyed], heads[:, queries + keyed :]
        if self._first_places is None:
            self._first_places = self._places_of(keyed)[::keyed].contiguous()
        kernel.place(heads, angles, norms, epsilon, self.cache.of(layer, key), self._first_places)
        return self._attended(layer, heads[:, :queries], key, value, scaling, window)

    def _attended(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """Attention over the cache, which holds the new tokens already."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        offset = len(self.singles)
        outputs = []
        if offset:
            # The query heads that share a key head become rows of one small matrix, so nothing is repeated.
            rows = query[:offset].unflatten(1, (key.shape[1], -1))
            outputs.append(self._reader(window, rows)(keys, values, rows, scaling).flatten(1, 2))
        for segment in self.longer:
            span = slice(offset, offset + segment.count)
            offset = span.stop
            mine, seen_keys, seen_values = (part[span].transpose(0, 1) for part in (query, key, value))
            if segment.start:
                seen = segment.start + segment.count
                seen_keys, seen_values = (self.cache.tokens(store, segment.slot, seen) for store in (keys, values))
            outputs.append(self._prefill(mine, seen_keys, seen_values, scaling, window).transpose(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _places_of(self, heads: int) -> torch.Tensor:
        if heads not in self._places:
            self._places[heads] = self.cache.places(self.segments, heads).to(self.device)
        return self._places[heads]

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
        return attend_segments(query, key, value, [segment], scaling, window, self._stretch_masks)[:, before:]

    def _reader(self, window: int | None, rows: torch.Tensor) -> Reader:
        """What attends the decoding rows. What a window may hide is not shared."""
        if window is not None and window > max(s.start for s in self.singles):
            window = None
        if window not in self._readers:
            self._readers[window] = reader_of(self.singles, window, rows)
        return self._readers[window]


WORTH_WAITING = 16
"""Prompt tokens that make it worth a pass to wait for a neighbour who is computing them."""
NEARLY = 64
"""Tokens by which what two slots share may be longer than the beginning they are known to share already."""


@dataclass
class Slot:
    """A row of the cache: the tokens whose keys and values it holds, and whether a sequence is using it."""

    held: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    busy: bool = False
    last_used: int = -1
    prefix: Prefix | None = None
    """A beginning of `held` that other slots hold too."""


@dataclass(frozen=True)
class Placement:
    """Where a prompt goes, and the `shared` tokens of it that slot `source` holds."""

    slot: int
    source: int
    shared: int


class Slots:
    """The rows of the cache."""

    def __init__(self, count: int) -> None:
        self.slots = [Slot() for _ in range(count)]

    def __getitem__(self, index: int) -> Slot:
        return self.slots[index]

    @property
    def free(self) -> list[int]:
        return [i for i, slot in enumerate(self.slots) if not slot.busy]

    def forget(self) -> None:
        """Nothing that was computed counts any longer."""
        for slot in self.slots:
            slot.held, slot.prefix = np.empty(0, dtype=np.int64), None

    def place(self, prompt: np.ndarray, coming: int) -> Placement | None:
        """Where `prompt` has least left to compute; None when no slot is free, or a neighbour is about to have
        `coming` tokens of it ready, enough more than any slot holds.
        """
        free = self.free
        if not free:
            return None
        # The last token is always computed anew: its output is what the first sampled token is drawn from.
        cached = [common_prefix(slot.held, prompt[:-1]) for slot in self.slots]
        source = int(np.argmax(cached))
        shared = cached[source]
        if coming >= shared + WORTH_WAITING:
            return None
        # A slot that holds just this prefix is an earlier turn, or the same prompt asked again: continue there.
        # Otherwise take the longest unused.
        in_place = [i for i in free if cached[i] == shared > 0 and len(self.slots[i].held) - shared <= 1]
        target = in_place[0] if in_place else min(free, key=lambda i: (self.slots[i].last_used, i))
        return Placement(target, target if cached[target] == shared else source, shared)

    def take(self, placement: Placement, prompt: np.ndarray, clock: int) -> None:
        """Let a sequence use the slot; the shared tokens are taken to be there."""
        slot, source = self.slots[placement.slot], self.slots[placement.source]
        if slot is not source:
            slot.prefix = self._common(source, placement.shared)
        elif slot.prefix is not None and slot.prefix.tokens > placement.shared:
            slot.prefix = None
        slot.held, slot.busy, slot.last_used = prompt[: placement.shared], True, clock

    def release(self, index: int, held: np.ndarray, clock: int) -> None:
        """Free the slot but remember what it holds, for the episode's next turn or a neighbour's prompt."""
        slot = self.slots[index]
        slot.held, slot.busy, slot.last_used = held, False, clock

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Pairs (free, busy) of slots to exchange so that the busy ones are the first."""
        busy = [i for i, slot in enumerate(self.slots) if slot.busy]
        free = [i for i in range(len(busy)) if not self.slots[i].busy]
        return zip(free, reversed(busy), strict=False)

    def swap(self, one: int, other: int) -> None:
        """Exchange what two slots hold and who uses them."""
        self.slots[one], self.slots[other] = self.slots[other], self.slots[one]

    def _common(self, source: Slot, shared: int) -> Prefix | None:
        """The mark of what a slot now has in common with `source`."""
        known = source.prefix
        if known is not None and 0 <= shared - known.tokens <= NEARLY:
            return known
        if shared < WORTH_WAITING:
            return None
        made = Prefix(shared)
        if known is None or known.tokens < shared:
            source.prefix = made
        return made


def common_prefix(held: np.ndarray, prompt: np.ndarray) -> int:
    """Number of leading tokens that two id arrays share."""
    length = min(len(held), len(prompt))
    if length == 0 or held[0] != prompt[0]:
        return 0
    differs = held[:length] != prompt[:length]
    first = int(differs.argmax())
    return first if differs[first] else length
