"""Packed attention on a GPU: one call of the variable-length flash kernel for the whole row.

The kernel takes spans of queries and, for each, a span of keys, aligned at their ends. A segment is one span whose keys
are its own and those before it in its stream. The keys and values of a shared prefix are copied for each segment that
continues it, for the duration of the call. Streams without a shared prefix need no copy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from posttrain.errors import InputError
from posttrain.models.forward import upload
from posttrain.models.layers import RowSegment

Kernel = Callable[["Spans", torch.Tensor, torch.Tensor, torch.Tensor, float, int | None], torch.Tensor]
"""Spans, query [T, H, D], key and value [K, H_kv, D], scaling, window -> [T, H, D]."""


@dataclass(frozen=True)
class Spans:
    """S spans of queries side by side in a row of T tokens, each with its span of the K keys, on one device. The i-th
    last query of a span sees the keys of the span up to the i-th last."""

    query_ends: torch.Tensor
    """[S + 1] int32: 0, then the end of each span of queries."""
    key_ends: torch.Tensor
    """[S + 1] int32: 0, then the end of each span of keys."""
    longest_query: int
    longest_key: int
    gathered: torch.Tensor | None
    """[K] int64: the row index of each key; None if the keys are the row itself."""
    keys_seen: torch.Tensor | None = None
    """[S] int32: number of keys that the last query of each span attends to, if spans have unused room at their ends;
    None: all."""

    @property
    def lengths(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        return self.query_ends, self.key_ends, self.longest_query, self.longest_key


def spans_of(segments: Sequence[RowSegment], device: torch.device) -> Spans:
    """The spans of the segments of a `PackedLayout`, copied to `device` without synchronization."""
    queries = [segment.stop - segment.start for segment in segments]
    keys = [segment.seen + count for segment, count in zip(segments, queries, strict=True)]
    gathered = None
    if sum(keys) > sum(queries):
        gathered = np.concatenate([np.arange(*part) for segment in segments for part in segment.keys])
    return Spans(
        query_ends=upload(np.cumsum([0, *queries], dtype=np.int32), device),
        key_ends=upload(np.cumsum([0, *keys], dtype=np.int32), device),
        longest_query=max(queries),
        longest_key=max(keys),
        gathered=None if gathered is None else upload(gathered, device),
    )


def supports(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether the flash kernel supports heads of `size`: bfloat16 or float16, Ampere or newer, sizes from 8 to 256."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and size % 8 == 0
        and size <= 256
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def use_flash_attention(name: Literal["fa2", "fa3", "fa4"], device: torch.device) -> None:
    """Select the FlashAttention of PyTorch's attention functions in this process; no effect on a CPU.

    Raises:
        InputError: its package is missing, or does not fit the GPU.
    """
    from torch.nn import attention

    wanted = None if name == "fa2" else name.upper()
    if device.type != "cuda" or attention.current_flash_attention_impl() == wanted:
        return
    if wanted is None:
        attention.restore_flash_attention_impl()
        return
    try:
        attention.activate_flash_attention_impl(wanted)
    except (ImportError, RuntimeError, ValueError) as error:
        package = {"FA3": "flash_attn_interface", "FA4": "flash-attn-4"}[wanted]
        raise InputError(
            f"model.attention: {name} could not be activated ({str(error).splitlines()[0]}); install {package}, or use fa2"
        ) from error


def flash(
    spans: Spans, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, window: int | None
) -> torch.Tensor:
    """The `Kernel` of PyTorch: flash attention 2 (Dao 2023, arXiv 2307.08691)."""
    from torch.nn.attention.varlen import varlen_attn

    assert spans.keys_seen is None, "spans with unused room need flash_over_cache"
    # The kernel always accepted fewer key heads than query heads; newer versions of the function need a flag for it.
    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    # `window_size` does not count the token itself; `window` does.
    left = -1 if window is None else window - 1
    out = varlen_attn(query, key, value, *spans.lengths, scale=scaling, window_size=(left, 0), **options)
    assert isinstance(out, torch.Tensor)
    return out


def flash_over_cache(
    spans: Spans, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, window: int | None
) -> torch.Tensor:
    """`flash` for spans of keys with unused room at their ends, without a gradient.

    It calls the operation behind `varlen_attn`, because that function has no argument for the room in torch 2.11. A single
    query per span is at the end of its keys, so that it needs no mask: only without one does the kernel share the keys among
    the query heads of a group, and split long spans (`seqlenq_ngroups_swapped` in flash_api.cpp).
    """
    masked = spans.longest_query > 1 or window is not None
    dropout, causal, debug = 0.0, masked and window is None, False
    sides = {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0 if masked else -1}
    settings = {"scale": scaling, "seqused_k": spans.keys_seen, **sides}
    inputs = (query, key, value, *spans.lengths)
    return torch.ops.aten._flash_attention_forward(*inputs, dropout, causal, debug, **settings)[0]


def attend_spans(
    spans: Spans,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    kernel: Kernel = flash,
) -> torch.Tensor:
    """As `Layout.attend`: query [H, T, D], key and value [H_kv, T, D] -> [H, T, D], differentiable."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if spans.gathered is not None:
            key, value = _Gather.apply(key, spans.gathered), _Gather.apply(value, spans.gathered)
        return kernel(spans, query, key, value, scaling, window)

    rows = [heads.transpose(0, 1) for heads in (query, key, value)]
    if spans.gathered is not None and torch.is_grad_enabled():
        # Copies of shared keys are recomputed in the backward pass: stored for every layer, they would take more memory
        # than sharing saves. No random numbers are drawn, so the generator state is not saved.
        out = checkpoint(attend, *rows, use_reentrant=False, preserve_rng_state=False)
    else:
        out = attend(*rows)
    return out.transpose(0, 1)


class _Gather(torch.autograd.Function):
    """rows[index] for rows [T, H, D]; gradients of a row that was gathered several times are summed in float32."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.count = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        (index,), gradient = ctx.saved_tensors, gradients[0]
        wide = torch.promote_types(gradient.dtype, torch.float32)
        sums = gradient.new_zeros(ctx.count, *gradient.shape[1:], dtype=wide).index_add_(0, index, gradient.to(wide))
        return sums.to(gradient.dtype), None
