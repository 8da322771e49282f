"""The attention function of all models: every token attends according to the layout of the current forward pass.

transformers calls the attention of every decoder through one interface and passes unknown keyword arguments on to it.
posttrain registers one function there, which delegates to the `Layout` of the forward pass. Packed training
(`models.forward`) and cached decoding (`engines.local.cache`) are layouts.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from posttrain.errors import InputError

ATTENTION_NAME = "posttrain"
"""Name under which the attention function is registered with transformers."""


class RowSegment(NamedTuple):
    """Tokens [start, stop) of a row. Each attends to the tokens in `before`, and causally to those of the segment."""

    start: int
    stop: int
    before: tuple[tuple[int, int], ...] = ()
    """The stream's tokens before the segment: ranges [start, stop) of the row, each non-empty, in the stream's
    order.
    """

    @property
    def seen(self) -> int:
        """Number of tokens before the segment."""
        return sum(stop - start for start, stop in self.before)

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """The ranges of all tokens that the segment's last token attends to."""
        return (*self.before, (self.start, self.stop))


class Layout(Protocol):
    """Which tokens the T tokens of one forward pass attend to. Tokens of all sequences form one row without padding."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """Attention outputs [H, T, D] of the T tokens of this pass.

        `query` [H, T, D], `key` and `value` [H_kv, T, D] are those of the new tokens only. `scaling` multiplies the
        scores. `window` limits attention to the last `window` tokens, including the token itself.
        """
        ...


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, window: int | None
) -> torch.Tensor:
    """Causal attention [H, Q, D] of the last Q of K positions: query [H, Q, D], key and value [H_kv, K, D]."""
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
    """Repeat key or value heads [H_kv, K, D] to [count, K, D]: each serves count / H_kv query heads."""
    groups = count // heads.shape[0]
    return heads if groups == 1 else heads.repeat_interleave(groups, dim=0)


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
            "a model with posttrain attention needs a layout in every forward pass; call models.forward.hidden_states"
        )
    unsupported = [name for name in ("softcap", "s_aux", "position_bias") if extra.get(name) is not None]
    if unsupported or dropout > 0:
        what = f"attention with {', '.join(unsupported)}" if unsupported else "attention dropout"
        raise InputError(f"model.path: {type(module).__name__} uses {what}, which packed attention does not support")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = layout.attend(module.layer_idx, query[0], key[0], value[0], scale, sliding_window)  # type: ignore[arg-type]
    return out.transpose(0, 1)[None], None


def use_packed_attention(model: torch.nn.Module) -> None:
    """Make `model`, any decoder of transformers, attend through the layout that each forward pass receives."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)
    model.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
