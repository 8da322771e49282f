"""Norms, gates and rotary positions of known decoders in fewer passes over memory, each with its own backward pass.

transformers writes these as chains of small operations, every one of which reads and writes all activations and keeps
some for the backward pass; on a CPU they cost as much as the matrix products. Here each is one autograd function that
keeps its inputs alone. Weights, names of modules and results (but for rounding) stay as they are.
"""

import re
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from posttrain.models.attention import ATTENTION_NAME
from posttrain.models.cpu.products import OneDnnLinear, prefers_onednn

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Decoders whose norm, gated network and attention are those written out here."""

ELEMENTS_IN_CACHE = 1 << 17
"""Numbers in float32 at one time in a norm."""


class _RmsNorm(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + epsilon) over the last dimension: Zhang and Sennrich 2019, arXiv 1910.07467."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        kind, size = torch.promote_types(x.dtype, torch.float32), x.shape[-1]
        rows, out = x.reshape(-1, size), torch.empty_like(x, memory_format=torch.contiguous_format)
        inverse = rows.new_empty(len(rows), 1, dtype=kind)
        for part in _parts(rows):
            wide = rows[part].to(kind)
            torch.add(torch.linalg.vecdot(wide, wide)[:, None] / size, epsilon, out=inverse[part]).rsqrt_()
            torch.mul((wide * inverse[part]).to(x.dtype), weight, out=out.view(-1, size)[part])
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        kind, size = inverse.dtype, x.shape[-1]
        rows, above_rows, scale = x.reshape(-1, size), gradient.reshape(-1, size), weight.to(kind)
        of_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        of_weight = torch.zeros_like(scale) if ctx.needs_input_grad[1] else None
        for part in _parts(rows):
            normal, above = rows[part].to(kind) * inverse[part], above_rows[part].to(kind)
            products = above * normal
            if of_weight is not None:
                of_weight += products.sum(0)
            along = torch.mv(products, scale)[:, None] / size
            torch.mul(above, scale, out=products).addcmul_(normal, along, value=-1).mul_(inverse[part])
            of_x.view(-1, size)[part] = products
        return of_x, None if of_weight is None else of_weight.to(weight.dtype), None


def _parts(rows: torch.Tensor) -> list[slice]:
    """Spans of rows whose intermediate results stay in the cache."""
    count = max(1, ELEMENTS_IN_CACHE // rows.shape[1])
    return [slice(start, start + count) for start in range(0, len(rows), count)]


class _Gated(torch.autograd.Function):
    """silu(gate) * up: the gate of Shazeer 2020, arXiv 2002.05202. It keeps its inputs alone."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
        return of_gate, silu(gate).mul_(gradient)


class _Rotated(torch.autograd.Function):
    """Rotary positions (Su et al. 2021, arXiv 2104.09864) of `heads` [..., T, H, D] with `cos`, `sin` [T, 1, D]."""

    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return turn(heads, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return turn(gradient, cos, sin, -1.0), None, None


def turn(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: float = 1.0) -> torch.Tensor:
    """`heads` [..., T, H, D] with each pair (i, i + D / 2) turned by its angle, backwards for `direction` -1.

    The two halves of `cos` and of `sin` [T, 1, D] are the same.
    """
    half = heads.shape[-1] // 2
    turned = heads * cos
    turned[..., :half].addcmul_(heads[..., half:], sin[..., :half], value=-direction)
    turned[..., half:].addcmul_(heads[..., :half], sin[..., half:], value=direction)
    return turned


class _Norm(torch.nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.device.type != "cpu":
            return super().forward(hidden_states)
        return _RmsNorm.apply(hidden_states, self.weight, self.variance_epsilon)


class _Network(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu":
            return super().forward(x)
        return self.down_proj(_Gated.apply(self.gate_proj(x), self.up_proj(x)))  # type: ignore[operator]


class _Attention(torch.nn.Module):
    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any = None, **keywords: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        own: Any = self
        layout = keywords.get("layout")
        if hidden_states.device.type != "cpu" or layout is None or own.config._attn_implementation != ATTENTION_NAME:
            return super().forward(hidden_states, position_embeddings=position_embeddings, **keywords)
        shape = (*hidden_states.shape[:-1], -1, own.head_dim)
        query, key, value = (project(hidden_states).view(shape) for project in (own.q_proj, own.k_proj, own.v_proj))
        if hasattr(own, "q_norm"):
            query, key = own.q_norm(query), own.k_norm(key)
        cos, sin = (part[0, :, None] for part in position_embeddings)
        query, key = _Rotated.apply(query, cos, sin), _Rotated.apply(key, cos, sin)
        heads = (rows[0].transpose(0, 1) for rows in (query, key, value))
        # Qwen has its window in the layers that it is for, Mistral in the configuration, Llama none.
        where = own.config if own.config.model_type == "mistral" else own
        window = getattr(where, "sliding_window", None)
        out = layout.attend(own.layer_idx, *heads, own.scaling, window)
        return own.o_proj(out.transpose(0, 1).reshape(*hidden_states.shape[:-1], -1)), None


_PARTS = {"RMSNorm": _Norm, "MLP": _Network, "Attention": _Attention}


def use_fused_layers(model: torch.nn.Module) -> None:
    """Make the known parts of `model` compute in fewer passes on a CPU, and its products with the faster library.

    Whatever else it holds stays as it is.
    """
    module: Any
    # The output projection is computed together with what follows it.
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    for module in model.modules():
        cls = type(module)
        if cls is torch.nn.Linear and module is not head and module.weight.dtype == torch.float32 and prefers_onednn():
            module.__class__ = OneDnnLinear
            continue
        known = re.fullmatch(rf"transformers\.models\.({'|'.join(FAMILIES)})\.modeling_\1", cls.__module__)
        part = _PARTS.get(re.sub(r"^(Llama|Mistral|Qwen2|Qwen3)", "", cls.__name__)) if known else None
        if part is None:
            continue
        if part is _Network and module.config.hidden_act != "silu":
            continue
        if part is _Attention and module.attention_dropout > 0:
            continue
        # A subclass rather than a method of the object: copies of a module then compute with their own weights.
        module.__class__ = type(cls.__name__, (part, cls), {"__module__": __name__})
