"""The exactness gate of the local engine: which way of decoding has the learner's log-probabilities.

The engine's parts are compared with the learner on the loaded weights, from the fastest to the slowest, as
`models.gate` compares forward passes. The last one recomputes every sequence by the learner's own pass.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from posttrain.distributed.world import current_world
from posttrain.engines.local.cache import CachedLayout, KeyValuePages, Segment
from posttrain.engines.local.cuda import FlashLayout, KeyValueRows, RecordedDecoder
from posttrain.engines.local.decoder import ModuleDecoder, decoder_of
from posttrain.engines.local.streams import StreamCaches, StreamDecoder, StreamLayout
from posttrain.models import gate
from posttrain.models.forward import base_decoder, logits_of, path_of, transformer
from posttrain.models.layers import lengths_of

Decoding = Literal["fused", "flash", "paged", "modules", "cached", "placed", "whole"]
"""`fused`: GPU kernels, recorded. `flash`: the same without the kernels of `models.cuda.decoding`. `paged`: the paged cache,
with the fastest operations. `modules`: the same by the model's modules. `cached`: a cache of transformers for each sequence.
`placed`: the same, with position ids. `whole`: every sequence from its first token."""
STEPS = (1, 1, 5, 1, 1)
"""New tokens of each sequence in the passes after its prompt: decoding, and an observation."""


class Parts:
    """What `Decoding` selects."""

    def __init__(self, kind: Decoding) -> None:
        self.kind = kind
        self.streams = kind in ("cached", "placed", "whole")
        self.flash = kind in ("fused", "flash")
        layouts = {"fused": FlashLayout, "flash": FlashLayout, "paged": CachedLayout, "modules": CachedLayout}
        self.layout: Any = layouts.get(kind, StreamLayout)
        self.decoder: Callable[[torch.nn.Module], Any] = partial(decoder_of, recorded=self.flash, fused=kind == "fused")
        """Makes a decoder with the current weights of a model."""
        if self.streams:
            self.decoder = partial(StreamDecoder, caches=kind != "whole", places=kind == "placed")
        elif kind == "modules":
            self.decoder = ModuleDecoder

    def cache(self, slots: int, most_pages: int | None = None) -> Any:
        """An empty cache."""
        if self.streams:
            return StreamCaches(slots)
        return (KeyValueRows if self.flash else KeyValuePages)(slots, most_pages)


def choose_decoding(model: torch.nn.Module, flash: bool, cache: Path) -> Parts:
    """The fastest exact way of decoding with `model`; `flash`: whether the flash kernel runs for its shapes. Verdicts
    are kept in the directory `cache`."""
    kinds: tuple[Decoding, ...] = ("cached", "placed", "whole")
    if path_of(model).packed:
        kinds = (*(("fused", "flash") if flash else ()), "paged", "modules", *kinds)
    key = gate.verdict_key(model, "decoding", *kinds)
    stored = gate.read_verdict(cache, key, {"kind", "reason", "nats"}) or _verdict(model, kinds)
    gate.keep_verdict(cache, key, stored)
    transformer(model).decoding = stored  # for `models.gate.exactness`
    if stored["kind"] == "whole":
        warnings.warn(
            f"sampling from {transformer(model).config.model_type} models computes every sequence again for each token, "
            f"which is slow: {stored['reason']}",
            stacklevel=3,
        )
    return Parts(stored["kind"])


def _verdict(model: torch.nn.Module, kinds: tuple[Decoding, ...]) -> dict[str, Any]:
    inner, reason = transformer(model), ""
    # A GPU's kernels for bfloat16 do not compute in float32, and FSDP frees the weights that it has gathered.
    exchanged = next(inner.parameters()).is_cpu and not current_world().sharded
    arithmetic = gate.computing_in_float32(inner) if exchanged else nullcontext(next(inner.parameters()).dtype)
    with arithmetic as dtype, gate.short_windows(inner), torch.no_grad():
        limit = gate.tolerance(dtype)
        rows = gate.gate_rows(inner)
        states, places = gate.pack_rows(model, rows)
        ends = [torch.from_numpy(at[np.cumsum(_counts(row)) - 1]) for at, row in zip(places, rows, strict=True)]
        references = [torch.log_softmax(logits_of(model, states[at.to(states.device)]), dim=-1) for at in ends]
        for kind in kinds[:-1]:
            try:
                found = gate.distance(_decoded(model, Parts(kind), rows), references)
            except Exception as error:
                reason = f"{kind} decoding fails ({type(error).__name__})"
                continue
            if found.within(limit):
                return {"kind": kind, "reason": reason, "nats": found.nats}
            reason = f"{kind} decoding differs from the learner by {found.nats:.2g} nats per token"
    return {"kind": "whole", "reason": reason, "nats": 0.0}


def _counts(row: torch.Tensor) -> list[int]:
    """New tokens of a row in each pass: its prompt, `STEPS`, and the last ten one by one."""
    return [len(row) - 10 - sum(STEPS), *STEPS, *[1] * 10]


def _decoded(model: torch.nn.Module, parts: Parts, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Log-probabilities after each pass of `_counts`, by the engine's parts."""
    device = rows[0].device
    cache, decoder = parts.cache(len(rows)), parts.decoder(model)
    outputs: list[list[torch.Tensor]] = [[] for _ in rows]
    computed, lengths, by_length = [0] * len(rows), [0] * len(rows), lengths_of(base_decoder(model))
    counts = [_counts(row) for row in rows]
    for number in range(max(map(len, counts))):
        segments = []
        for slot, each in enumerate(counts):
            if number < len(each):
                stop = sum(each[: number + 1])
                length = 0 if by_length is None else by_length.of(stop)
                start = computed[slot] if length == lengths[slot] else 0
                lengths[slot] = length
                segments.append(Segment(slot, start, stop - start, length=length))
        layout = parts.layout(cache, segments, device)
        spans = [(segment.slot, segment.start, segment.start + segment.count) for segment in layout.segments]
        ids = torch.cat([rows[slot][start:stop] for slot, start, stop in spans])
        positions = torch.cat([torch.arange(start, stop, device=device) for _, start, stop in spans])
        layout.tokens = [rows[slot][:stop].cpu().numpy() for slot, _, stop in spans]
        last = torch.tensor([stop - start for _, start, stop in spans], device=device).cumsum(0) - 1
        hidden = None
        if isinstance(decoder, RecordedDecoder) and len(layout.singles) == len(spans):
            row = np.zeros(len(spans))
            inputs = np.stack(
                [ids.cpu(), positions.cpu(), [segment.slot for segment in layout.segments], row, row, row]
            )
            hidden = decoder.replayed(inputs, cache, device, samples=False)
        logits = decoder.logits((decoder.hidden(ids, positions, layout) if hidden is None else hidden)[last])
        for (slot, _, stop), row in zip(spans, logits, strict=True):
            outputs[slot].append(torch.log_softmax(row.float(), dim=-1))
            computed[slot] = stop
    return [torch.stack(rows) for rows in outputs]
