"""Replacements in the decoders of transformers: attention in all; norms, MLPs and rotary positions in known ones.

Attention: transformers calls the attention of every decoder through one interface and passes unknown keyword arguments on to
it. posttrain registers one function there, which delegates to the `Layout` of the forward pass. Packed training
(`models.forward`) and cached decoding (`engines.local.cache`) are layouts.

Rotary positions of `longrope` and `dynamic` depend on the length of a sequence. transformers chooses one set of frequencies
for a whole forward pass, by the largest position in it, and the dynamic ones remember the longest sequence of earlier passes.
Here each token gets the frequencies of its own sequence: token t of a stream is predicted with those of length t, as an engine
samples it. So a stream that crosses the switch is packed once for each set of frequencies (`models.packing`), and an engine
recomputes its cache when a sequence crosses.

Fused layers (`model.fused`): norms, gated MLPs and rotary positions as few large operations. Weights, module names and
results (up to rounding) do not change. On a CPU they are the autograd functions of `cpu.backend`. On a GPU they are these
and PyTorch's norm, or Liger's kernels.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from posttrain.errors import InputError
from posttrain.models.cpu.backend import Gated, OneDnnLinear, RmsNorm, Rotary, prefers_onednn
from posttrain.plugins import require_module

ATTENTION_NAME = "posttrain"
"""Name under which the attention function is registered with transformers."""

# -- attention ---------------------------------------------------------------------------------------------------------


class RowSegment(NamedTuple):
    """Tokens [start, stop) of a row. Each attends to the tokens in `before`, and causally to those of the segment."""

    start: int
    stop: int
    before: tuple[tuple[int, int], ...] = ()
    """The stream's tokens before the segment: ranges [start, stop) of the row, each non-empty, in the stream's
    order."""
    length: int = 0
    """The length that decides the rotary frequencies of its tokens (`models.layers.Lengths.of`)."""

    @property
    def seen(self) -> int:
        """Number of tokens before the segment."""
        return sum(stop - start for start, stop in self.before)

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """The ranges of all tokens that the segment's last token attends to."""
        return (*self.before, (self.start, self.stop))


class Bounds(NamedTuple):
    """What some models do to attention scores, after scaling."""

    cap: float | None
    """Scores s become cap * tanh(s / cap) (Gemma 2)."""
    sinks: torch.Tensor | None
    """[H]: for each head the score of one more key, whose value is zero (GPT-OSS)."""


class Heads(NamedTuple):
    """What one layer attends with."""

    query: torch.Tensor
    """[H, T, D], of the T tokens of the pass."""
    key: torch.Tensor
    """[H_kv, T, D]."""
    value: torch.Tensor
    """[H_kv, T, D_v]."""
    scaling: float
    """Factor of the scores."""
    window: int | None
    """Attention is limited to the last `window` tokens, including the token itself."""
    bounds: Bounds | None = None


class Layout(Protocol):
    """Which tokens the T tokens of one forward pass attend to. Tokens of all sequences form one row without padding."""

    def attend(self, layer: int, heads: Heads) -> torch.Tensor:
        """Attention outputs [H, T, D_v] of the T tokens of this pass."""
        ...

    def lengths(self) -> list[int] | None:
        """For each token the length that decides its rotary frequencies (`models.layers`); None if it is 0 for all."""
        ...


def causal_attention(heads: Heads) -> torch.Tensor:
    """Causal attention [H, Q, D_v] of the last Q of K positions: query [H, Q, D], key [H_kv, K, D], value [H_kv, K, D_v]."""
    query, key, value, scaling, window, bounds = heads
    queries, keys = query.shape[1], key.shape[1]
    if (groups := len(query) // len(key)) > 1:  # the query heads of each key head
        key, value = key.repeat_interleave(groups, dim=0), value.repeat_interleave(groups, dim=0)
    mask = None
    square = queries == keys and (window is None or window >= keys)
    if bounds is not None or (not square and (queries > 1 or (window is not None and window < keys))):
        rows = torch.arange(keys - queries, keys, device=query.device)[:, None]
        columns = torch.arange(keys, device=query.device)[None, :]
        mask = columns <= rows
        if window is not None:
            mask &= columns > rows - window
    if bounds is not None:
        scores = (query @ key.transpose(1, 2) * scaling).float()
        if bounds.cap is not None:
            scores = bounds.cap * torch.tanh(scores / bounds.cap)
        assert mask is not None
        scores = scores.masked_fill(~mask, float("-inf"))
        if bounds.sinks is None:
            probabilities = scores.softmax(-1)
        else:
            sinks = bounds.sinks.float()[:, None, None].expand(-1, queries, 1)
            probabilities = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        return probabilities.to(value.dtype) @ value
    causal = square and queries > 1
    return scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, is_causal=causal, scale=scaling
    )[0]


def packed_attention(
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
    """The attention function that transformers calls: the layout of the pass attends. Without one, the tokens are the
    last of one sequence."""
    if layout is None and (len(query) > 1 or attention_mask is not None):
        raise RuntimeError(
            "a model with posttrain attention computes one sequence without padding, or rows with a layout; call "
            "models.forward.hidden_states"
        )
    if extra.get("position_bias") is not None or dropout > 0:
        what = "a position bias" if extra.get("position_bias") is not None else "attention dropout"
        raise InputError(f"model.path: {type(module).__name__} uses {what}, which packed attention does not support")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    cap, sinks = extra.get("softcap"), extra.get("s_aux")
    bounds = None if cap is None and sinks is None else Bounds(cap, sinks)
    heads = Heads(query[0], key[0], value[0], scale, sliding_window, bounds)
    out = causal_attention(heads) if layout is None else layout.attend(module.layer_idx, heads)  # type: ignore[arg-type]
    return out.transpose(0, 1)[None], None


# -- recurrent layers --------------------------------------------------------------------------------------------------


def by_stream(layout: Any, compute: Callable[[np.ndarray], torch.Tensor]) -> torch.Tensor:
    """Outputs [T, D] of a row, from `compute` of the row indices [n] int64 of each stream of a `PackedLayout`, which
    returns [n, D]. Tokens that streams share have the outputs of the first."""
    outputs, source, end = [], np.full(layout.segments[-1].stop, -1), 0
    for places in layout.streams():
        outputs.append(compute(places))
        new = source[places] < 0
        source[places[new]] = end + np.flatnonzero(new)
        end += len(places)
    return torch.cat(outputs)[torch.from_numpy(source).to(outputs[0].device)]


class _ByStream(torch.nn.Module):
    """A convolution or recurrence over tokens, in which the streams of a packed row do not continue each other."""

    def forward(self, hidden_states: torch.Tensor, *extra: Any, layout: Any = None, **named: Any) -> Any:
        if layout is None:
            return super().forward(hidden_states, *extra, **named)

        def compute(places: np.ndarray) -> torch.Tensor:
            rows = torch.from_numpy(places).to(hidden_states.device)
            return super(_ByStream, self).forward(hidden_states[:, rows], *extra, **named)[0]

        return by_stream(layout, compute)[None]


def is_by_stream(module: torch.nn.Module) -> bool:
    """Whether `module` is one of `use_layers_by_stream`."""
    return isinstance(module, _ByStream)


def use_layers_by_stream(model: torch.nn.Module) -> None:
    """Make the convolutions and recurrences of `model` compute each stream of a packed row for itself, in place."""
    for name, module in model.named_modules():
        if hasattr(module, "recurrent_states"):
            module.register_forward_hook(_detach_states)
        cls = type(module)
        mixes_tokens = re.search(r"\.(linear_attn|conv|mamba|mixer|self_attn)$", name)
        attends = name.endswith("self_attn") and "Delta" not in cls.__name__
        if mixes_tokens and not attends and cls.__module__.startswith("transformers.models."):
            module.__class__ = type(cls.__name__, (_ByStream, cls), {"__module__": __name__})


def _detach_states(module: Any, inputs: Any, outputs: Any) -> None:
    """Detach the last state, which RecurrentGemma keeps in the module: tensors with a graph cannot be copied."""
    module.recurrent_states = module.recurrent_states.detach()


# -- rotary positions by length ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """Which lengths of a sequence share their frequencies. 0 stands for all lengths up to `original` tokens."""

    original: int
    each: bool
    """Whether every length beyond `original` has its own frequencies (`dynamic`), or all have the same (`longrope`)."""

    def of(self, length: int) -> int:
        """The smallest length with the frequencies of a sequence of `length` tokens, or 0."""
        if length <= self.original:
            return 0
        return length if self.each else self.original + 1

    def spans(self, tokens: int) -> list[tuple[int, int, int]]:
        """(length, first, stop) for a stream of `tokens` tokens: the outputs of tokens first .. stop - 1 have the
        frequencies of `length`, in a pass over the tokens before `stop`."""
        short = min(tokens, self.original)
        if self.each:
            beyond = [(count, count - 1, count) for count in range(short + 1, tokens + 1)]
        else:
            beyond = [(self.original + 1, short, tokens)] if tokens > short else []
        return [(0, 0, short), *beyond]


class _ByLength(torch.nn.Module):
    """A rotary embedding of transformers that treats the tokens of each length separately."""

    lengths: Sequence[int] | None = None
    """For each token of the next pass its `Lengths.of`; None if all are 0."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *extra: Any, **named: Any) -> Any:
        module: Any = self
        if self.lengths is None:
            self._forget()
            return super().forward(x, position_ids, *extra, **named)
        lengths = torch.tensor(self.lengths)
        parts: list[Any] = [None, None]
        for length in lengths.unique().tolist():
            self._forget()
            chosen = (lengths == length).nonzero()[:, 0].to(position_ids.device)
            # The position after the tokens decides the frequencies.
            last = position_ids.new_full((1, 1), max(length, 1) - 1)
            positions = torch.cat([position_ids[:, chosen], last], dim=1)
            for index, part in enumerate(super().forward(x, positions, *extra, **named)):
                if parts[index] is None:
                    parts[index] = part.new_empty(part.shape[0], len(self.lengths), part.shape[2])
                parts[index][:, chosen] = part[:, :-1]
        module._forget()
        return tuple(parts)

    def _forget(self) -> None:
        """Restore the frequencies of short sequences, which `dynamic` ones overwrite."""
        module: Any = self
        if "dynamic" in module.rope_type and module.max_seq_len_cached != module.original_max_seq_len:
            module.inv_freq = module.original_inv_freq.to(module.inv_freq.device)
            module.max_seq_len_cached = module.original_max_seq_len


def use_positions_by_length(decoder: Any) -> None:
    """Replace the rotary embedding of `decoder`, a base model of transformers, in place if it depends on the length.
    InputError if only some layers have such positions, or if the embedding is not the usual one."""
    for name, module in decoder.named_modules():
        kind = getattr(module, "rope_type", None)
        kinds = list(kind.values()) if isinstance(kind, dict) else [kind]
        if not any(kind in ("longrope", "dynamic") for kind in kinds):
            continue
        if name != "rotary_emb" or isinstance(kind, dict):
            raise InputError(
                f"model.path: positions of this {decoder.config.model_type} model depend on the length ({name} has "
                f"rope_type {kind}) in a way that is not supported; set another rope_type in its config.json"
            )
        module.__class__ = type(type(module).__name__, (_ByLength, type(module)), {"__module__": __name__})


def lengths_of(decoder: Any) -> Lengths | None:
    """Which lengths share frequencies in `decoder`; None if all do."""
    rotary = getattr(decoder, "rotary_emb", None)
    if not isinstance(rotary, _ByLength):
        return None
    module: Any = rotary
    if module.rope_type == "longrope":
        return Lengths(int(module.config.rope_parameters["original_max_position_embeddings"]), each=False)
    return Lengths(int(module.original_max_seq_len), each=True)


def set_lengths(decoder: Any, lengths: Sequence[int] | None) -> None:
    """Set the lengths that decide the frequencies of each token of the next pass of `decoder`."""
    module = getattr(decoder, "rotary_emb", None)
    if isinstance(module, _ByLength):
        module.lengths = lengths


# -- fused layers ------------------------------------------------------------------------------------------------------

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Decoders of transformers whose norm, gated MLP and attention these functions can replace."""


@dataclass(frozen=True)
class Functions:
    """The functions of one value of `model.fused`."""

    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    """x [..., D], weight [D], epsilon -> [..., D]."""
    gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """gate and up projections [..., I] -> silu(gate) * up."""
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """query [1, T, H, D], key [1, T, H_kv, D], cos and sin [1, T, D] -> both rotated."""


@cache
def own() -> Functions:
    """The autograd functions of `cpu.backend`, and PyTorch's norm on a GPU."""

    def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        # On a GPU one kernel of PyTorch, as in the local engine.
        return RmsNorm.apply(x, weight, epsilon) if x.is_cpu else rms_norm(x, weight.shape, weight, epsilon)

    def rotate(query: torch.Tensor, key: torch.Tensor, *angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = (part[0, :, None] for part in angles)
        return Rotary.apply(query, cos, sin), Rotary.apply(key, cos, sin)

    return Functions(norm, Gated.apply, rotate)


@cache
def liger() -> Functions:
    """The Triton kernels of Hsu et al. 2024, "Liger Kernel", arXiv 2410.10989. InputError without the package."""
    ops: Any = require_module("liger_kernel.ops", "model.fused liger")

    def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        # Not in place: the gradient of a residual is still needed.
        return ops.LigerRMSNormFunction.apply(x, weight, epsilon, 0.0, "llama", False)

    def rotate(query: torch.Tensor, key: torch.Tensor, *angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # It takes heads before tokens, and writes into contiguous arguments.
        rotated = ops.LigerRopeFunction.apply(query.transpose(1, 2), key.transpose(1, 2), *angles)
        return rotated[0].transpose(1, 2), rotated[1].transpose(1, 2)

    return Functions(norm, ops.LigerSiLUMulFunction.apply, rotate)


def resolve_fused(name: Literal["auto", "liger", "none"], device: torch.device) -> Literal["own", "liger", "none"]:
    """The layers that `model.fused` selects on `device`. InputError for Liger's kernels on a CPU."""
    if name == "auto":
        return "liger" if device.type == "cuda" and find_spec("liger_kernel") is not None else "own"
    if name == "liger" and device.type == "cpu":
        raise InputError("model.fused: Liger's kernels need a GPU; use auto")
    return name


class _Norm(torch.nn.Module):
    functions: Functions

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.functions.norm(hidden_states, self.weight, self.variance_epsilon)  # type: ignore[arg-type]


class _Mlp(torch.nn.Module):
    functions: Functions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.functions.gate(self.gate_proj(x), self.up_proj(x)))  # type: ignore[operator]


class _Attention(torch.nn.Module):
    functions: Functions

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any = None, **keywords: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        attention: Any = self
        layout = keywords.get("layout")
        installed = attention.config._attn_implementation == ATTENTION_NAME
        if layout is None or not installed:
            return super().forward(hidden_states, position_embeddings=position_embeddings, **keywords)
        shape = (*hidden_states.shape[:-1], -1, attention.head_dim)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, value = (project(hidden_states).view(shape) for project in projections)
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        query, key = self.functions.rotate(query, key, *position_embeddings)
        query, key, value = (rows[0].transpose(0, 1) for rows in (query, key, value))
        # Qwen sets the window per layer, Mistral in the configuration; Llama has none.
        owner = attention.config if attention.config.model_type == "mistral" else attention
        window = getattr(owner, "sliding_window", None)
        out = layout.attend(attention.layer_idx, Heads(query, key, value, attention.scaling, window))
        return attention.o_proj(out.transpose(0, 1).reshape(*hidden_states.shape[:-1], -1)), None


_REPLACEMENTS = {"RMSNorm": _Norm, "MLP": _Mlp, "Attention": _Attention}


def use_fused_layers(model: torch.nn.Module, fused: Literal["own", "liger", "none"] = "own") -> None:
    """Replace the norms, MLPs and attention of known decoders in `model` by fused ones, in place. Float32 linear layers
    use oneDNN where it is faster. All other modules stay as they are."""
    module: Any
    functions = None if fused == "none" else {"own": own, "liger": liger}[fused]()
    # The output projection is computed together with the log-probabilities.
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    for module in model.modules():
        cls = type(module)
        if cls is torch.nn.Linear and module is not head and module.weight.dtype == torch.float32 and prefers_onednn():
            module.__class__ = OneDnnLinear
            continue
        known = re.fullmatch(rf"transformers\.models\.({'|'.join(FAMILIES)})\.modeling_\1", cls.__module__)
        part = _REPLACEMENTS.get(re.sub(r"^(Llama|Mistral|Qwen2|Qwen3)", "", cls.__name__)) if known else None
        if part is None or functions is None or (part is _Mlp and module.config.hidden_act != "silu"):
            continue
        # A subclass, not a method on the instance: copies of a module then compute with their own weights.
        module.__class__ = type(cls.__name__, (part, cls), {"__module__": __name__, "functions": functions})
