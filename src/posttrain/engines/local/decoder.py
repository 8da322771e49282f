"""The forward pass of the local engine: through the model's modules, or as fewer and larger operations."""

from typing import Any, Protocol

import torch
from torch.nn.functional import rms_norm

from posttrain.engines.local.cache import CachedLayout
from posttrain.engines.local.cpu.kernel import decoding_kernel
from posttrain.engines.local.cpu.linear import SamplingLinear
from posttrain.models.cpu.backend import rotate
from posttrain.models.forward import hidden_states, logits_of, transformer

STREAMLINED = ("llama", "mistral", "qwen2", "qwen3")
"""Model types that `StreamlinedDecoder` supports: RMS norms, rotary positions, gated SiLU."""


class Decoder(Protocol):
    """The weights of one policy version, in the form that the engine computes with."""

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, layout: CachedLayout) -> torch.Tensor:
        """Last hidden states [T, hidden] of a row of tokens; `ids` and `positions` are [T] int64."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocabulary] float32 of hidden states [N, hidden]."""
        ...


def decoder_of(model: torch.nn.Module) -> Decoder:
    """The fastest decoder for `model`, with its current weights."""
    inner = transformer(model)
    config = inner.config
    known = config.model_type in STREAMLINED and config.hidden_act == "silu"
    return StreamlinedDecoder(inner) if known else ModuleDecoder(model)


class ModuleDecoder:
    """Runs any decoder of transformers through its modules."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, layout: CachedLayout) -> torch.Tensor:
        return hidden_states(self._model, ids, positions, layout)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return logits_of(self._model, hidden)


class StreamlinedDecoder:
    """Runs a decoder of the `STREAMLINED` types with ten operations per layer.

    Projections of the same input are one product, and the operation after a product (SiLU, gate, residual) is fused into
    it. Weights are read at construction.
    """

    def __init__(self, inner: Any) -> None:
        body = getattr(inner, inner.base_model_prefix)
        self._embed = body.embed_tokens
        self._rotary = body.rotary_emb
        self._layers = [_Layer(layer, inner.config) for layer in body.layers]
        self._norm = body.norm
        self._head = SamplingLinear(inner.get_output_embeddings())

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, layout: CachedLayout) -> torch.Tensor:
        x = self._embed(ids)
        cos, sin = (part[0] for part in self._rotary(x[None], positions[None]))
        for layer in self._layers:
            x = layer(x, cos, sin, layout)
        return _normed(self._norm, x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden).float()


class _Layer:
    """One layer: attention and gated MLP, each with a norm before it and a residual around it."""

    def __init__(self, layer: Any, config: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index = attention.layer_idx
        self.head = attention.head_dim
        self.scaling = attention.scaling
        mistral = config.model_type == "mistral"
        # Mistral sets the window in the configuration, the others per layer.
        self.window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None) if mistral else None)
        self.before, self.between = layer.input_layernorm, layer.post_attention_layernorm
        self.head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self.norms = self.head_norms and (attention.q_norm.weight, attention.k_norm.weight)
        self.epsilon = self.before.variance_epsilon
        self.project = SamplingLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        width = getattr(attention.q_proj, "base_layer", attention.q_proj).out_features
        self.queries = width // self.head
        self.keys = getattr(attention.k_proj, "base_layer", attention.k_proj).out_features // self.head
        base = self.before.weight
        self.kernel = decoding_kernel(base.dtype, self.head, self.queries // self.keys) if base.is_cpu else None
        self.combine = SamplingLinear(attention.o_proj)
        self.gate, self.up = SamplingLinear(mlp.gate_proj), SamplingLinear(mlp.up_proj)
        self.down = SamplingLinear(mlp.down_proj)

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: CachedLayout) -> torch.Tensor:
        """`x` [T, hidden], `cos` and `sin` [T, D] -> [T, hidden]."""
        heads = self.project(self._normed(self.before, x)).view(len(x), -1, self.head)
        if self.kernel is not None:
            attended = layout.attend_fused(
                self.index,
                heads,
                self.keys,
                self.kernel,
                (cos, sin),
                self.norms,
                self.epsilon,
                self.scaling,
                self.window,
            )
        else:
            attended = self._attend(heads, cos[:, None], sin[:, None], layout)
        x = self.combine.plus(attended.flatten(1), x)
        inputs = self._normed(self.between, x)
        return self.down.plus(self.up.times(inputs, self.gate.silu(inputs)), x)

    def _attend(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: CachedLayout) -> torch.Tensor:
        rotated = heads[:, : self.queries + self.keys]
        if self.head_norms is not None:
            parts = rotated.split([self.queries, self.keys], dim=1)
            rotated = torch.cat([_normed(norm, part) for norm, part in zip(self.head_norms, parts, strict=True)], dim=1)
        rotated = rotate(rotated, cos, sin)
        query, key = rotated[:, : self.queries], rotated[:, self.queries :]
        value = heads[:, self.queries + self.keys :]
        return layout.attend_tokens(self.index, query, key, value, self.scaling, self.window)

    def _normed(self, norm: Any, x: torch.Tensor) -> torch.Tensor:
        if self.kernel is not None and x.shape[-1] % 32 == 0:
            return self.kernel.normalize(x, norm.weight, norm.variance_epsilon)
        return _normed(norm, x)


def _normed(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
