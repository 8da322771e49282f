"""The key/value cache of the local engine: one slab, a row per sequence, and the layout that reads and fills it."""

from collections.abc import Sequence

import torch

from posttrain.engines.plan import Part, Run, Segment, plan_decoding
from posttrain.models.attention import causal_attention


class KeyValueSlab:
    """Keys and values of all layers, each [slots, H_kv, capacity, D]. A row's tokens stand at their positions.

    The capacity grows by doubling as sequences do.
    """

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
                store[layer] = self._empty(old.shape[1], old)
                store[layer][:, :, : old.shape[2]] = old

    def write(self, layer: int, places: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values [T, H_kv, D] at `places` [T] int64, which are slot x H_kv x capacity + position."""
        heads = key.shape[1]
        if layer not in self.keys:
            self.keys[layer], self.values[layer] = self._empty(heads, key), self._empty(heads, key)
        rows = (places[:, None] + torch.arange(heads, device=places.device) * self.capacity).flatten()
        self.keys[layer].flatten(0, 2).index_copy_(0, rows, key.flatten(0, 1))
        self.values[layer].flatten(0, 2).index_copy_(0, rows, value.flatten(0, 1))

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        """Give slot `target` the first `tokens` tokens of slot `source`."""
        for store in (self.keys, self.values):
            for rows in store.values():
                rows[target, :, :tokens] = rows[source, :, :tokens]

    def _empty(self, heads: int, like: torch.Tensor) -> torch.Tensor:
        # Zeros, since what a mask hides is still multiplied, and must be finite.
        return like.new_zeros(self.slots, heads, self.capacity, like.shape[-1])


class CachedLayout:
    """New tokens of many sequences in one row; each attends to its own cached past and, causally, to itself.

    Segments of one token (decoding) come first and are attended in runs of neighbouring slots; longer ones (prompts)
    one by one. What decoding sequences share is read once for all of them.
    """

    def __init__(self, slab: KeyValueSlab, segments: Sequence[Segment], device: torch.device) -> None:
        self.slab = slab
        self.device = device
        singles = [s for s in segments if s.count == 1]
        self.longer = [s for s in segments if s.count > 1]
        slab.reserve(max(s.start + s.count for s in segments))
        self.singles, self._shared = plan_decoding(singles, share=True)
        self._apart: list[Part] | None = None
        self._longest = max((s.start + 1 for s in singles), default=0)
        self._masks: dict[tuple[int, int | None], torch.Tensor | None] = {}
        self._places: dict[int, torch.Tensor] = {}

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
        heads = key.shape[1]
        self.slab.write(layer, self._places_of(heads), key, value)
        keys, values = self.slab.keys[layer], self.slab.values[layer]
        offset = len(self.singles)
        outputs = []
        if offset:
            # The query heads that share a key head become rows of one small matrix, so nothing is repeated.
            rows = query[:offset].unflatten(1, (heads, -1)) * scaling
            parts = [self._decode(part, keys, values, rows, window) for part in self._parts(window)]
            outputs += [part.flatten(1, 2) for part in parts]
        for segment in self.longer:
            span = slice(offset, offset + segment.count)
            offset = span.stop
            mine = (segment.slot, slice(None), slice(0, segment.start + segment.count))
            out = causal_attention(query[span].transpose(0, 1), keys[mine], values[mine], scaling, window)
            outputs.append(out.transpose(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _places_of(self, heads: int) -> torch.Tensor:
        """[T] int64: where the slab takes the tokens of this pass."""
        if heads not in self._places:
            stride = heads * self.slab.capacity
            places = [s.slot * stride + p for s in self.segments for p in range(s.start, s.start + s.count)]
            self._places[heads] = torch.tensor(places, device=self.device)
        return self._places[heads]

    def _parts(self, window: int | None) -> Sequence[Part]:
        """How the decoding rows are attended. What a window may hide is not shared."""
        if window is None or window >= self._longest:
            return self._shared
        if self._apart is None:
            self._apart = plan_decoding(self.singles, share=False)[1]
        return self._apart

    def _decode(
        self, part: Part, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """[R, H_kv, G, D] for the rows of a part; `rows` [B, H_kv, G, D] are all scaled queries.

        What the rows share is multiplied once for all of them, and its scores join those of their own tokens.
        """
        mine = rows[part.rows]
        count, heads, groups, size = mine.shape
        common = (part.source, slice(None), slice(0, part.tokens))
        if part.tokens:
            together = mine.transpose(0, 1).reshape(heads, count * groups, size)
            scores = (together @ keys[common].transpose(1, 2)).view(heads, count, groups, -1).transpose(0, 1)
        outputs, weights = [], []
        for run in part.runs:
            local = slice(run.rows.start - part.rows.start, run.rows.stop - part.rows.start)
            both = _products(keys[run.slots, :, run.columns], mine[local])
            mask = self._mask(run, window)
            if mask is not None:
                both = both.masked_fill(mask, -torch.inf)
            if part.tokens:
                both = torch.cat([scores[local], both], dim=-1)
            shares = both.softmax(-1, dtype=torch.float32).to(mine.dtype)
            weights.append(shares[..., : part.tokens])
            outputs.append(shares[..., part.tokens :] @ values[run.slots, :, run.columns])
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if part.tokens:
            shares = torch.cat(weights).transpose(0, 1).reshape(heads, count * groups, -1)
            out += (shares @ values[common]).view(heads, count, groups, size).transpose(0, 1)
        return out

    def _mask(self, run: Run, window: int | None) -> torch.Tensor | None:
        """[R, 1, 1, columns] bool: which cached positions each decoding token does not see; None where it sees all."""
        key = (run.rows.start, window)
        if key not in self._masks:
            starts = torch.tensor([s.start for s in self.singles[run.rows]])[:, None]
            columns = torch.arange(run.columns.start, run.columns.stop)[None]
            hidden = columns > starts
            if window is not None:
                hidden |= columns <= starts - window
            self._masks[key] = hidden[:, None, None].to(self.device) if bool(hidden.any()) else None
        return self._masks[key]


def _products(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Scores [R, H_kv, G, L] of `queries` [R, H_kv, G, D] with `keys` [R, H_kv, L, D].

    In bfloat16 a processor multiplies the large matrix by the small one much faster than the other way round, where
    it would first lay out the large one anew.
    """
    if keys.dtype == torch.bfloat16:
        return (keys @ queries.transpose(2, 3)).transpose(2, 3)
    return queries @ keys.transpose(2, 3)
