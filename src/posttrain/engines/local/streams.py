"""Decoding one sequence at a time, for models whose sequences cannot share a pass (`ForwardPath`).

Each slot has a cache of transformers of its own, whatever kind the model makes: keys and values, convolution and recurrent
states. Such states cannot be cut or copied, so a slot is continued whole or begun again. Tokens are decoded one by one after
the first pass, because many recurrent layers read a state only then. A model whose caches are not exact is computed from
its first token each time.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from posttrain.engines.local.cache import Segment
from posttrain.models.forward import alone_output, hidden_states, logits_of, transformer
from posttrain.models.layers import RowSegment
from posttrain.models.packing import PackedLayout

_CACHES = ("cache", "past_key_values", "cache_params", "state", "mems")
"""Names under which models return their cache and take it again. Later names may be deprecated ones of the first."""


class StreamCaches:
    """The tokens of each slot, and what the model keeps of them. The counterpart of `KeyValuePages`."""

    pages = bytes = 0

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.trim()

    def trim(self) -> None:
        """Discard everything."""
        self.ids = [torch.empty(0, dtype=torch.int64)] * self.slots
        self.states: list[dict[str, Any]] = [{} for _ in range(self.slots)]


class StreamLayout:
    """New tokens of several sequences, in the order of `segments`."""

    longer = ()
    tokens: Sequence[np.ndarray] = ()

    def __init__(self, cache: StreamCaches, segments: Sequence[Segment], device: torch.device) -> None:
        self.cache = cache
        self.segments = list(segments)
        self.singles = [segment for segment in segments if segment.count == 1]


class StreamDecoder:
    """Runs a model of transformers on one sequence after the other, with its current weights."""

    def __init__(self, model: torch.nn.Module, caches: bool, places: bool = False) -> None:
        """`caches`: whether it uses the model's own caches, or computes every token again. `places`: whether it names the
        positions of tokens, which some models need with a cache and others count in their own way."""
        self._model, self._caches, self._places = model, caches, places

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, layout: StreamLayout) -> torch.Tensor:
        """States [T, hidden] that `logits` takes; `ids` and `positions` are [T] int64."""
        cache, outputs = layout.cache, []
        ends = np.cumsum([0, *(segment.count for segment in layout.segments)]).tolist()
        for segment, (start, stop) in zip(layout.segments, pairwise(ends), strict=True):
            new = ids[start:stop]
            if segment.start == 0:
                cache.ids[segment.slot], cache.states[segment.slot] = new, {}
            else:
                cache.ids[segment.slot] = torch.cat([cache.ids[segment.slot], new])
            if self._caches:
                outputs.append(self._cached(cache, segment, new))
                continue
            # The states of the new tokens, from a pass over the whole sequence.
            whole = cache.ids[segment.slot]
            row = PackedLayout([RowSegment(0, len(whole), length=segment.length)])
            states = hidden_states(self._model, whole, row.positions().to(whole.device), row)
            outputs.append(states[segment.start :])
        return torch.cat(outputs)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return logits_of(self._model, hidden)

    def _cached(self, cache: StreamCaches, segment: Segment, ids: torch.Tensor) -> torch.Tensor:
        """The states of the new tokens, from passes that continue the slot's cache."""
        outputs, at = [], segment.start
        for piece in [ids] if segment.start == 0 else ids.split(1):
            named = dict(cache.states[segment.slot])
            if self._places:
                named["position_ids"] = torch.arange(at, at + len(piece), device=ids.device)[None]
            states, output = alone_output(transformer(self._model), piece, use_cache=True, **named)
            outputs.append(states)
            name = next((name for name in _CACHES if getattr(output, name, None) is not None), None)
            cache.states[segment.slot] = {} if name is None else {name: output[name]}
            at += len(piece)
        return torch.cat(outputs)
