"""Packed attention on a GPU: one call of the variable-length flash kernel for a whole row, whatever it holds.

The kernel takes spans of queries and, for each, a span of keys, and aligns their last positions; so a continuation
whose keys are those of its prompt and its own is one span. Where continuations share a prompt, the prompt's keys are
laid out once more for each of them (key and value heads alone, for the time of the call); streams with a prompt of
their own need no copy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

Kernel = Callable[["Spans", torch.Tensor, torch.Tensor, torch.Tensor, float, int | None], torch.Tensor]
"""Spans, query [T, H, D], key and value [K, H_kv, D], scaling, window -> [T, H, D]."""


@dataclass(frozen=True)
class Spans:
    """S spans of queries side by side in a row of T tokens, each with its span among K keys, on one device.

    The i-th last query of a span sees the keys of its span up to the i-th last.
    """

    query_ends: torch.Tensor
    """[S + 1] int32: 0, then where each span of queries ends."""
    key_ends: torch.Tensor
    """[S + 1] int32: the same of the keys."""
    longest_query: int
    longest_key: int
    gathered: torch.Tensor | None
    """[K] int64: the token of the row that each key is taken from; None where the keys are the row as it is."""


def spans_of(bundles: Sequence[tuple[int, Sequence[int]]], device: torch.device) -> Spans:
    """The spans of the bundles of a `PackedLayout`; they are sent to `device` without waiting for it."""
    queries: list[int] = []
    keys: list[int] = []
    taken: list[np.ndarray] = []
    start = 0
    for prompt, continuations in bundles:
        rest = list(continuations)
        # A stream with a prompt of its own is one plain causal span.
        first = prompt + rest.pop() if len(rest) == 1 else prompt
        queries.append(first)
        keys.append(first)
        taken.append(np.arange(start, start + first))
        own = start + first
        for length in rest:
            queries.append(length)
            keys.append(prompt + length)
            taken += [np.arange(start, start + prompt), np.arange(own, own + length)]
            own += length
        start = own
    shared = sum(keys) > start
    return Spans(
        query_ends=_sent(np.cumsum([0, *queries], dtype=np.int32), device),
        key_ends=_sent(np.cumsum([0, *keys], dtype=np.int32), device),
        longest_query=max(queries),
        longest_key=max(keys),
        gathered=_sent(np.concatenate(taken), device) if shared else None,
    )


def supports(query: torch.Tensor) -> bool:
    """Whether the flash kernel takes `query` [H, T, D]: bfloat16 or float16 on a GPU since Ampere, D of 8 to 256."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def flash(
    spans: Spans, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, window: int | None
) -> torch.Tensor:
    """The `Kernel` of PyTorch: flash attention 2 (Dao 2023, arXiv 2307.08691)."""
    from torch.nn.attention.varlen import varlen_attn

    # The kernel always took fewer key heads than query heads; newer versions of the function want to be told.
    told: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    out = varlen_attn(
        query,
        key,
        value,
        spans.query_ends,
        spans.key_ends,
        spans.longest_query,
        spans.longest_key,
        scale=scaling,
        # It counts the tokens before, we count the token itself too.
        window_size=(-1 if window is None else window - 1, 0),
        **told,
    )
    assert isinstance(out, torch.Tensor)
    return out


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
            key, value = _Gathered.apply(key, spans.gathered), _Gathered.apply(value, spans.gathered)
        return kernel(spans, query, key, value, scaling, window)

    rows = [heads.transpose(0, 1) for heads in (query, key, value)]
    if spans.gathered is not None and torch.is_grad_enabled():
        # The copies of a prompt's keys are made again in the backward pass: kept for every layer they would take
        # more memory than the shared prompt saves. Nothing here is random, so no generator needs to be kept.
        out = checkpoint(attend, *rows, use_reentrant=False, preserve_rng_state=False)
    else:
        out = attend(*rows)
    return out.transpose(0, 1)


class _Gathered(torch.autograd.Function):
    """rows[index], rows [T, H, D]; the gradients of a row that was taken often are added up in float32."""

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


def _sent(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """On `device`; from pinned memory, so that the processor goes on while the copy waits for the GPU's turn."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
