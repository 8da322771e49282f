"""The local engine on a GPU: the key/value cache, one call of the variable-length flash kernel for all sequences of a
forward pass, passes recorded as CUDA graphs, and running sums for sampling.

A slot is contiguous, so the kernel reads the keys of each sequence in place, for any length. Prompts and decoding
sequences are attended together. PyTorch's kernel does not support page tables without FlashAttention 3.

Decoding a few sequences takes a GPU less time than Python needs to start its kernels, so a pass without prompts is
recorded once for a number of sequences, and then started as a whole.
"""

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from posttrain.engines.local.cache import CachedLayout, KeyValuePages, Segment, positions_of
from posttrain.engines.local.cpu.kernel import PAGE
from posttrain.errors import RunError
from posttrain.models.cuda.attention import Spans, flash_over_cache
from posttrain.models.forward import upload
from posttrain.models.layers import Heads

if TYPE_CHECKING:
    from posttrain.engines.local.decoder import Decoder

Recorder = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]
"""Records the GPU work of a function without running it. Returns a function that runs this work again, and the tensor
to which it writes what the recorded function returned."""

RECORDED_AFTER = 4
"""Passes of a size that run kernel by kernel before it is recorded, so that sizes that are rarely needed are not."""
TERMS = 256
"""Numbers that `sum_by_products` adds by one product."""


class KeyValueRows(KeyValuePages):
    """Keys and values of all layers, each [slots, tokens, H_kv, D]."""

    @property
    def tokens_per_slot(self) -> int:
        return self.pages * PAGE

    @property
    def bytes(self) -> int:
        """Bytes of memory that the cache occupies."""
        return self.slots * self.pages * self._page_bytes

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
        for store, new in zip(self.layer(layer, key, value), (key, value), strict=True):
            store.flatten(0, 1).index_copy_(0, rows, new)

    def rows(self, segments: Sequence[Segment], heads: int) -> torch.Tensor:
        """[T] int64: the cache rows of the tokens of `segments`."""
        slots = np.repeat([s.slot for s in segments], [s.count for s in segments])
        return torch.from_numpy(slots * self.tokens_per_slot + positions_of(segments))

    def tokens(self, store: torch.Tensor, slot: int, count: int) -> torch.Tensor:
        """A view [H_kv, count, D] of the first `count` keys or values of a slot."""
        return store[slot, :count].transpose(0, 1)

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens from slot `source` to slot `target`."""
        for store in self._stores:
            store[target, :tokens] = store[source, :tokens]


class FlashLayout(CachedLayout):
    """As `CachedLayout`, with segments ordered by slot."""

    def __init__(self, cache: KeyValueRows, segments: Sequence[Segment], device: torch.device) -> None:
        self._ordered = sorted(segments, key=lambda s: s.slot)
        super().__init__(cache, self._ordered, device)
        self._spans: Spans | None = None
        self._row_index: torch.Tensor | None = None

    @property
    def segments(self) -> list[Segment]:
        return self._ordered

    def decoding(self, positions: torch.Tensor, slots: torch.Tensor) -> "FlashLayout":
        """The layout of one token of each of S sequences, at `positions` [S] of `slots` [S], both int64 on the device.
        It reads nothing but these tensors, so that a recorded pass is that of the sequences which they name when it
        runs."""
        room = self.cache.pages * PAGE
        begins, count = slots * room, len(slots)
        layout = copy.copy(self)
        layout._row_index = begins + positions
        layout._spans = Spans(
            query_ends=torch.arange(count + 1, dtype=torch.int32, device=self.device),
            key_ends=torch.cat([begins, begins[-1:] + room]).int(),
            longest_query=1,
            longest_key=room,
            gathered=None,
            keys_seen=(positions + 1).int(),
        )
        return layout

    def first_rows(self, kv_heads: int) -> torch.Tensor:
        return self._rows_of(kv_heads)

    def _rows_of(self, heads: int) -> torch.Tensor:
        if self._row_index is None:
            self._row_index = upload(self.cache.rows(self._ordered, heads), self.device)
        return self._row_index

    def _attention(self, layer: int, heads: Heads) -> torch.Tensor:
        if heads.bounds is not None:
            raise ValueError("the flash kernel has no soft caps and sinks")
        keys, values = (store[layer].flatten(0, 1) for store in (self.cache.keys, self.cache.values))
        if self._spans is None:
            room = len(keys) // self.cache.slots
            counts = [segment.count for segment in self._ordered]
            seen = [segment.start + segment.count for segment in self._ordered]
            begins = [segment.slot * room for segment in self._ordered]
            self._spans = Spans(
                query_ends=upload(np.cumsum([0, *counts], dtype=np.int32), self.device),
                key_ends=upload(np.array([*begins, begins[-1] + room], dtype=np.int32), self.device),
                longest_query=max(counts),
                longest_key=max(seen),
                gathered=None,
                keys_seen=upload(np.array(seen, dtype=np.int32), self.device),
            )
        return flash_over_cache(self._spans, heads.query, keys, values, heads.scaling, heads.window)


# -- recorded passes --------------------------------------------------------------------------------------------------


_RECORDING = threading.Lock()


class CudaGraphs:
    """The `Recorder` of a GPU. Its recordings share memory, so they run one after another. Other threads may start
    kernels and wait for their own meanwhile. There is one recording at a time. `torch.cuda.graph` would also wait for
    the entire GPU and give all free memory back to it, which takes longer than the recording."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        graph, current, aside = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(current)
        with _RECORDING, torch.cuda.stream(aside):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                out = run()
            finally:
                graph.capture_end()
        current.wait_stream(aside)
        self._pool = graph.pool()
        return graph.replay, out


@dataclass(frozen=True)
class _Recorded:
    replay: Callable[[], None]
    out: torch.Tensor
    """What the last pass computed: tokens and log-probabilities [2, S], or hidden states [S, hidden]."""
    inputs: torch.Tensor
    """[6, S] float64: `Rows.inputs` of the next pass."""


Sampler = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`sampler(logits, settings)`: tokens and their log-probabilities [2, S] float64 from logits [S, vocabulary], for settings
[3, S] float64: temperature, or 1 where 0, uniform number, and 1 where the temperature is 0."""


class RecordedDecoder:
    """A decoder whose passes of one token per sequence are recorded, by number of sequences, and replayed. Sampling is part of
    them unless it truncates. What they need is uploaded at once, and the sampled tokens stay on the device as well, so that
    the next pass can be started before they are read.

    Numbers are rounded up to at most half as much again; the last sequence is computed several times then. Nothing is
    recorded with deterministic kernels, since copies of a sequence write the same place in no fixed order.

    Recorded passes read weights where they were, so they are those of new weights that were written to the same place.
    """

    def __init__(
        self, decoder: "Decoder", sampler: Sampler, make_recorder: Callable[[], Recorder] | None = None
    ) -> None:
        """`make_recorder`: `CudaGraphs` by default."""
        self._decoder = decoder
        self._sampler = sampler
        self._places = places(decoder)
        self._make_recorder = make_recorder or CudaGraphs
        self._record = self._make_recorder()
        self._passes: dict[tuple[int, bool], _Recorded] = {}
        self._uses: Counter[int] = Counter()
        self._pages = 0
        self._last: torch.Tensor | None = None
        """[slots] int64: the token that a recorded pass sampled last in each slot."""

    def renew(self, decoder: "RecordedDecoder") -> None:
        """Decode with the weights of another decoder. Recorded passes are kept if it reads the same places."""
        if self._places != decoder._places:
            self.forget()
        self._decoder, self._places = decoder._decoder, decoder._places

    def forget(self) -> None:
        """Discard the recorded passes, of a cache that moves. Sizes that were recorded are again at their first pass."""
        self._passes.clear()
        self._record = self._make_recorder()

    def reads(self) -> Iterator[torch.Tensor]:
        return self._decoder.reads()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._decoder.logits(hidden)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, layout: CachedLayout) -> torch.Tensor:
        return self._decoder.hidden(ids, positions, layout)

    @property
    def records(self) -> bool:
        return not torch.are_deterministic_algorithms_enabled()

    def replayed(
        self, inputs: np.ndarray, cache: KeyValueRows, device: torch.device, samples: bool, ahead: bool = False
    ) -> torch.Tensor | None:
        """What the recorded pass of `inputs` (`Rows.inputs`) computes: tokens and log-probabilities [2, S], or hidden states
        [S, hidden] if it does not sample. None if it is not recorded; one that is `ahead` is not recorded now."""
        if not self.records:
            return None
        if self._pages != cache.pages:
            # The cache has moved, and recorded passes read its old place.
            self._pages = cache.pages
            self.forget()
        # The number of sequences for which the pass is recorded: 1, 2, 3, 4, 6, 8, 12, 16, 24, ...
        count = inputs.shape[1]
        step = 1 << max(0, (count - 1).bit_length() - 2)
        key = size, _ = -(-count // step) * step, samples
        if (recorded := self._passes.get(key)) is None:
            self._uses[size] += not ahead
            if ahead or self._uses[size] <= RECORDED_AFTER:
                return None
        padded = torch.from_numpy(np.concatenate([inputs, *[inputs[:, -1:]] * (size - count)], axis=1))
        if recorded is None:
            held = upload(padded, device)
            self._last = held.new_zeros(cache.slots, dtype=torch.int64) if self._last is None else self._last
            run = partial(self._run, held, FlashLayout(cache, [Segment(0, 0, 1)], device), samples)
            recorded = self._passes[key] = _Recorded(*self._record(run), held)
        else:
            recorded.inputs.copy_(padded.pin_memory() if device.type == "cuda" else padded, non_blocking=True)
        recorded.replay()
        return recorded.out[:, :count] if samples else recorded.out[:count]

    def _run(self, inputs: torch.Tensor, layout: FlashLayout, samples: bool) -> torch.Tensor:
        ids, positions, slots = inputs[:3].long()
        assert self._last is not None
        ids = torch.where(ids < 0, self._last[slots], ids)
        hidden = self._decoder.hidden(ids, positions, layout.decoding(positions, slots))
        if not samples:
            return hidden
        numbers = self._sampler(self.logits(hidden), inputs[3:])
        # Of the copies of a sequence, which may round differently, the first counts, as on the CPU.
        self._last.index_copy_(0, slots, numbers[0].long()[torch.searchsorted(slots, slots)])
        return numbers


def places(decoder: "Decoder") -> list[tuple[int, torch.Size]]:
    """Where a pass of the decoder reads weights, as addresses and shapes."""
    return [(tensor.data_ptr(), tensor.shape) for tensor in decoder.reads()]


def sum_by_products(values: torch.Tensor) -> torch.Tensor:
    """Running sums [..., N] along the last dimension of `values` [..., N], by products with triangular matrices of ones:
    within blocks, and over the sums of the blocks before. torch has no deterministic kernel for them on a GPU."""
    count = values.shape[-1]
    width = min(count, TERMS)
    whole = -(-count // width) * width
    blocks = torch.nn.functional.pad(values, (0, whole - count)).unflatten(-1, (-1, width))
    sums = blocks @ torch.ones(width, width, dtype=values.dtype, device=values.device).triu()
    if whole > width:
        ends = sums[..., -1]
        sums = sums + (sum_by_products(ends) - ends)[..., None]
    return sums.flatten(-2)[..., :count].contiguous()
