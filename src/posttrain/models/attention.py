"""Attention over a layout: which token sees which, in one flat row of tokens without padding.

Every decoder of transformers calls its attention through one interface and hands unknown keyword arguments down to
it. `posttrain` registers one function there, which asks the `Layout` of the current forward pass. Packed training
and cached decoding are two layouts of the same mechanism.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from posttrain.errors import InputError
from posttrain.models.cpu.attention import Masks, attend_segments, segments_of
from posttrain.models.cuda.attention import Spans, attend_spans, spans_of, supports

ATTENTION_NAME = "posttrain"


class Layout(Protocol):
    """What the tokens of one forward pass attend to."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """Attention outputs of the T tokens of this pass.

        `query` [H, T, D], `key` and `value` [H_kv, T, D] of the new tokens alone, in one row; `scaling` multiplies the
        scores; `window` (tokens) limits how far back a token sees, itself included. Returns [H, T, D].
        """
        ...


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, window: int | None
) -> torch.Tensor:
    """Attention of the last Q of K positions to all before them: query [H, Q, D], key and value [H_kv, K, D]."""
    queries, keys = query.shape[1], key.shape[1]
    mask = None
    square = queries == keys and (window is None or window >= keys)
    if not square and (queries > 1 or (window is not None and window < keys)):
        rows = torch.arange(keys - queries, keys, device=query.device)[:, None]
        columns = torch.arange(keys, device=query.device)[None, :]
        mask = columns <= rows
        if window is not None:
            mask &= columns > rows - window
    return scaled_dot_product_attention(
        query[None],
        _repeat(key, query.shape[0])[None],
        _repeat(value, query.shape[0])[None],
        attn_mask=mask,
        is_causal=square and queries > 1,
        scale=scaling,
    )[0]


def _repeat(heads: torch.Tensor, count: int) -> torch.Tensor:
    """Key or value heads [H_kv, K, D] as [count, K, D]: each serves count / H_kv query heads."""
    groups = count // heads.shape[0]
    return heads if groups == 1 else heads.repeat_interleave(groups, dim=0)


class PackedLayout:
    """Bundles side by side in one row: each a prompt, and continuations that see the prompt and themselves.

    The continuations of a bundle do not see each other, so the episodes of a group share one forward of their prompt
    and get the outputs and gradients that each would get alone. A stream on its own is a bundle with one continuation.
    """

    def __init__(self, bundles: Sequence[tuple[int, Sequence[int]]]) -> None:
        """`bundles`: tokens of the prompt and of each continuation (none may be empty), in the order of the row."""
        self.bundles = [(prompt, list(continuations)) for prompt, continuations in bundles]
        self._lengths = [length for prompt, continuations in self.bundles for length in (prompt, *continuations)]
        self._segments = segments_of(self.bundles)
        self._masks = Masks()
        self._spans: Spans | None = None

    def positions(self) -> torch.Tensor:
        """[T] int64: position ids; they restart at 0 with each prompt and at the prompt's end with each continuation."""
        return torch.cat(
            [
                torch.arange(start, start + length)
                for prompt, continuations in self.bundles
                for start, length in [(0, prompt), *((prompt, length) for length in continuations)]
            ]
        )

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        if supports(query):
            self._spans = self._spans or spans_of(self.bundles, query.device)
            return attend_spans(self._spans, query, key, value, scaling, window)
        if query.device.type == "cpu":
            return attend_segments(query, key, value, self._segments, scaling, window, self._masks)
        pieces = zip(*(row.split(self._lengths, dim=1) for row in (query, key, value)), strict=True)
        outputs = []
        for _, continuations in self.bundles:
            query_part, prompt_key, prompt_value = next(pieces)
            outputs.append(causal_attention(query_part, prompt_key, prompt_value, scaling, window))
            for _ in continuations:
                query_part, key_part, value_part = next(pieces)
                keys, values = torch.cat([prompt_key, key_part], 1), torch.cat([prompt_value, value_part], 1)
                outputs.append(causal_attention(query_part, keys, values, scaling, window))
        return torch.cat(outputs, dim=1)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    if layout is None:
        raise RuntimeError(
            "a model in posttrain attention was called without a layout; use models.forward.hidden_states"
        )
    unsupported = [name for name in ("softcap", "s_aux", "position_bias") if extra.get(name) is not None]
    if unsupported or dropout > 0:
        what = f"attention with {', '.join(unsupported)}" if unsupported else "dropout in attention"
        raise InputError(f"model.path: {type(module).__name__} uses {what}, which packed attention does not offer")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = layout.attend(module.layer_idx, query[0], key[0], value[0], scale, sliding_window)  # type: ignore[arg-type]
    return out.transpose(0, 1)[None], None


def use_packed_attention(model: torch.nn.Module) -> None:
    """Make `model`, any decoder of transformers, attend through layouts."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)
    model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
