"""The forward pass of the local engine, and sampling from its logits.

The pass runs the model's modules, or fewer and larger operations that are equivalent. Sampling inverts the cumulative
distribution with one uniform number per token.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.functional import rms_norm

from posttrain.engines.local.cache import CachedLayout
from posttrain.engines.local.cpu.kernel import decoding_kernel
from posttrain.engines.local.cpu.layers import CompiledLayer, CompiledLayers, SamplingLinear
from posttrain.engines.local.cuda import RecordedDecoder, sum_by_products
from posttrain.models.cpu.backend import rotate
from posttrain.models.cuda import triton_kernels
from posttrain.models.forward import (
    Float32Head,
    base_decoder,
    float32_product,
    hidden_states,
    logits_of,
    transformer,
    upload,
)
from posttrain.models.layers import Heads, lengths_of, set_lengths
from posttrain.recipe.rollout import SamplingRecipe

STREAMLINED = ("llama", "mistral", "qwen2", "qwen3")
"""Model types that `StreamlinedDecoder` supports: RMS norms, rotary positions, gated SiLU."""

CANDIDATES = 512
"""Number of most probable tokens in which the top-p cut is searched first."""
BLOCK = 256
"""Tokens per block: the block is found from block sums, then the token within the block."""


# -- the forward pass -------------------------------------------------------------------------------------------------


class Decoder(Protocol):
    """The weights of one policy version, in the form that the engine uses."""

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, layout: CachedLayout) -> torch.Tensor:
        """Last hidden states [T, hidden] of a row of tokens; `ids` and `positions` are [T] int64."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocabulary] float32 of hidden states [N, hidden]."""
        ...

    def reads(self) -> Iterator[torch.Tensor]:
        """The weights that `hidden` and `logits` read, those of the model or copies of them."""
        ...


def decoder_of(model: torch.nn.Module, recorded: bool = False, fused: bool = False) -> Decoder:
    """The fastest decoder for `model`, with its current weights; `recorded`: it decodes by CUDA graphs where it can; `fused`: by
    the kernels of `models.cuda.decoding`."""
    inner = transformer(model)
    config = inner.config
    packed = getattr(inner, "is_loaded_in_4bit", False)  # only a model's own layers multiply by packed matrices
    if packed or config.model_type not in STREAMLINED or config.hidden_act != "silu":
        return ModuleDecoder(model)
    decoder = StreamlinedDecoder(inner, decoding_kernels() if fused else None)
    # A pass with positions that depend on the longest one waits for the GPU.
    recorded = recorded and lengths_of(base_decoder(inner)) is None
    return RecordedDecoder(decoder, sample_recorded) if recorded else decoder


def decoding_kernels() -> Any:
    """The module of Triton kernels; None without Triton."""
    return triton_kernels("decoding")


class ModuleDecoder:
    """Runs any decoder of transformers through its modules."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, layout: CachedLayout) -> torch.Tensor:
        return hidden_states(self._model, ids, positions, layout)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return logits_of(self._model, hidden)

    def reads(self) -> Iterator[torch.Tensor]:
        return self._model.parameters()


class StreamlinedDecoder:
    """Runs a decoder of the `STREAMLINED` types with ten operations per layer. Projections of the same input are one
    product, and the operation after a product (SiLU, gate, residual) is fused into it. Weights are read at
    construction."""

    def __init__(self, inner: Any, kernels: Any = None) -> None:
        """`kernels`: `decoding_kernels`, for passes over the cache of a GPU."""
        body = self._body = base_decoder(inner)
        self._embed = body.embed_tokens
        self._rotary = body.rotary_emb
        dtype = next(self._embed.parameters()).dtype
        self._layers = [_Layer(layer, inner.config, dtype, kernels) for layer in body.layers]
        self._kernels = kernels
        one, compiled = self._layers[0], [layer.compiled for layer in self._layers]
        self._compiled: CompiledLayers | None = None
        """All layers as one call, if all operations of all layers are compiled."""
        if kernels is None and one.kernel is not None and None not in compiled:
            whole = [layer for layer in compiled if layer]
            self._compiled = CompiledLayers(whole, one.kernel, one.keys, one.head, one.epsilon)
        self._norm = body.norm
        self._output = inner.get_output_embeddings()
        self._head: Callable[[torch.Tensor], torch.Tensor]
        """The output projection as a product for sampling, in float32 for a `Float32Head`."""
        self._copied: SamplingLinear | None = None
        """The copy of the projection that `_head` reads."""
        if not isinstance(self._output, Float32Head):
            # Adapters of a float32 head are added by its modules.
            whole_head = isinstance(getattr(self._output, "base_layer", None), Float32Head)
            self._head = self._output if whole_head else SamplingLinear(self._output)
        elif self._output.weight.is_cuda and self._output.bias is None:
            self._head = partial(float32_product, weight=self._output.weight.detach())
        else:
            copied = self._copied = SamplingLinear(copy.deepcopy(self._output).float())
            self._head = lambda hidden: copied(hidden.float())

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, layout: CachedLayout) -> torch.Tensor:
        x = self._embed(ids)
        set_lengths(self._body, layout.lengths())
        cos, sin = (part[0] for part in self._rotary(x[None], positions[None]))
        if self._compiled is not None and not layout.longer:
            return _normed(self._norm, self._compiled(x, cos, sin, layout))
        if self._kernels is not None:
            norms = [*(layer.before for layer in self._layers), self._norm]
            inputs = self._kernels.normalize(x, norms[0].weight, norms[0].variance_epsilon)
            for layer, after in zip(self._layers, norms[1:], strict=True):
                inputs = layer.fused(x, inputs, (cos, sin), layout, after)
            return inputs
        for layer in self._layers:
            x = layer(x, cos, sin, layout)
        return _normed(self._norm, x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden).float()

    def reads(self) -> Iterator[torch.Tensor]:
        yield from self._body.parameters()
        yield from self._output.parameters()
        copied = [] if self._copied is None else [self._copied]
        for linear in (*(linear for layer in self._layers for linear in layer.linears), *copied):
            yield from linear.tensors


class _Layer:
    """One layer: attention and gated MLP, each with a norm before it and a residual around it. `dtype`: of its input."""

    def __init__(self, layer: Any, config: Any, dtype: torch.dtype, kernels: Any) -> None:
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
        norms = [self.before, self.between, *(self.head_norms or ())]
        linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        weights = [getattr(module, "base_layer", module).weight for module in (*norms, *linears)]
        # The kernel gets pointers, so one weight of another dtype would be read beyond its end.
        fits = all(weight.is_cpu and weight.dtype == dtype for weight in weights)
        fitting = decoding_kernel(dtype, self.head, self.queries // self.keys) if fits else None
        self.kernel: Any = kernels or fitting
        self.combine = SamplingLinear(attention.o_proj)
        # Packed products have the operation after each fused into it.
        parts = [(mlp.gate_proj, mlp.up_proj)] if kernels is not None else [(mlp.gate_proj,), (mlp.up_proj,)]
        self.gated = [SamplingLinear(*modules) for modules in parts]
        self.down = SamplingLinear(mlp.down_proj)

    @property
    def linears(self) -> tuple[SamplingLinear, ...]:
        return (self.project, self.combine, *self.gated, self.down)

    def fused(
        self,
        x: torch.Tensor,
        inputs: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        layout: CachedLayout,
        after: Any,
    ) -> torch.Tensor:
        """As `__call__` with the kernels of a GPU: `x` is changed in place, `inputs` is its norm, and the norm `after` the layer
        is returned."""
        heads = self.project(inputs).view(len(x), -1, self.head)
        settings = (self.norms, self.epsilon, self.scaling, self.window)
        attended = layout.attend_fused(self.index, heads, self.keys, self.kernel, angles, *settings)
        added = self.combine(attended.flatten(1))
        inputs = self.kernel.normalize(x, self.between.weight, self.epsilon, added)
        (both,) = self.gated
        added = self.down(self.kernel.gate(both(inputs)))
        return self.kernel.normalize(x, after.weight, after.variance_epsilon, added)

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: CachedLayout) -> torch.Tensor:
        """`x` [T, hidden], `cos` and `sin` [T, D] -> [T, hidden]."""
        heads = self.project(self._normed(self.before, x)).view(len(x), -1, self.head)
        if self.kernel is not None:
            settings = (self.norms, self.epsilon, self.scaling, self.window)
            attended = layout.attend_fused(self.index, heads, self.keys, self.kernel, (cos, sin), *settings)
        else:
            rotated, value = heads[:, : self.queries + self.keys], heads[:, self.queries + self.keys :]
            if self.head_norms is not None:
                parts = zip(self.head_norms, rotated.split([self.queries, self.keys], dim=1), strict=True)
                rotated = torch.cat([_normed(norm, part) for norm, part in parts], dim=1)
            rotated = rotate(rotated, cos[:, None], sin[:, None])
            query, key = rotated[:, : self.queries], rotated[:, self.queries :]
            attended = layout.attend_tokens(self.index, Heads(query, key, value, self.scaling, self.window))
        x = self.combine.plus(attended.flatten(1), x)
        inputs = self._normed(self.between, x)
        gate, up = self.gated
        return self.down.plus(up.times(inputs, gate.silu(inputs)), x)

    @property
    def compiled(self) -> CompiledLayer | None:
        """The layer for `CompiledLayers`; None if one of its operations is not compiled."""
        products = [linear.compiled for linear in self.linears if linear.compiled is not None]
        if self.kernel is None or len(products) < len(self.linears) or self.before.weight.shape[-1] % 32:
            return None
        # Detached tensors keep their memory when a parameter's `data` is assigned.
        before, between = self.before.weight.detach(), self.between.weight.detach()
        norms = self.norms and (self.norms[0].detach(), self.norms[1].detach())
        return CompiledLayer(self.index, before, between, norms, products, self.scaling, self.window)

    def _normed(self, norm: Any, x: torch.Tensor) -> torch.Tensor:
        if self.kernel is not None and x.shape[-1] % 32 == 0:
            return self.kernel.normalize(x, norm.weight, norm.variance_epsilon)
        return _normed(norm, x)


def _normed(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """The norm of `x`, in the dtype of `x`."""
    return rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon).to(x.dtype)


# -- sampling ---------------------------------------------------------------------------------------------------------


def sample(
    logits: torch.Tensor, sampling: Sequence[SamplingRecipe], draws: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample tokens [B] int64 with log-probabilities [B] float32 from logits [B, vocabulary] float32, which are
    overwritten.

    Row b uses `sampling[b]` and the uniform number `draws[b]` in [0, 1). The log-probability is that of
    softmax(logits / temperature) over the whole vocabulary, before truncation; it is NaN for a row with NaN or an infinite
    largest logit.
    """
    greedy = [s.temperature == 0 for s in sampling]
    temperatures = [s.temperature or 1.0 for s in sampling]
    if any(temperature != 1 for temperature in temperatures):
        logits /= upload(torch.tensor(temperatures, dtype=torch.float32), logits.device)[:, None]
    largest, weights, log_total = _softmax(logits)
    if all(greedy):
        return logits.argmax(-1), -log_total
    cut = [b for b, s in enumerate(sampling) if truncates(s)]
    kept = weights
    if cut:
        kept, rows = weights.clone(), upload(cut, weights.device)
        kept[rows] = truncate(weights[rows], [sampling[b] for b in cut])
    tokens = _draw(kept, upload(torch.tensor(list(draws), dtype=torch.float64), logits.device))
    if any(greedy):
        tokens = torch.where(upload(greedy, logits.device), logits.argmax(-1), tokens)
    return tokens, logits.gather(1, tokens[:, None])[:, 0] - largest - log_total


def sample_recorded(logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    """As `sample` without truncation, for a recorded pass: all numbers are on the device (`engines.local.cuda.Sampler`)."""
    temperatures, draws, greedy = settings
    logits /= temperatures.float()[:, None]
    largest, weights, log_total = _softmax(logits)
    tokens = torch.where(greedy > 0, logits.argmax(-1), _draw(weights, draws))
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - largest - log_total
    return torch.stack([tokens.double(), logprobs.double()])


def _softmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The largest logit of each row, exp(logits - largest), and the logarithm of its sum."""
    largest = logits.amax(-1)
    weights = torch.exp_(logits - largest[:, None])
    return largest, weights, weights.sum(-1).log()


def _draw(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """For each row of `weights` [B, V] >= 0, the first token [B] at which the running sum exceeds draw x total; some token for
    a row with NaN. `draws`: [B] float64.

    The running sum of blocks finds the block, and the running sum within it the token, so one pass over the weights is
    enough. Sums are in float64: over 50,000 terms, the error of a float32 sum exceeds the smallest relevant
    probabilities.
    """
    rows, vocabulary = weights.shape
    missing = -vocabulary % BLOCK
    blocks = (torch.nn.functional.pad(weights, (0, missing)) if missing else weights).view(rows, -1, BLOCK)
    ends = _running_sum(blocks.sum(-1).double())
    total = ends[:, -1:]
    points = draws[:, None] * total
    # Rounding must not raise a point to the total, which lies beyond the last token with weight.
    points = torch.minimum(points, torch.nextafter(total, torch.zeros_like(total)))
    block = torch.searchsorted(ends, points, right=True).clamp_(max=blocks.shape[1] - 1)  # beyond only for NaN
    before = torch.nn.functional.pad(ends, (1, 0)).gather(1, block)
    inside = blocks[torch.arange(rows, device=weights.device), block[:, 0]].double()
    index = torch.searchsorted(_running_sum(inside), points - before, right=True)
    # Nor may it lie beyond the last such token of the block, because block sums are rounded to float32.
    last = BLOCK - 1 - (inside > 0).flip(-1).int().argmax(-1, keepdim=True)
    return (block * BLOCK + torch.minimum(index, last))[:, 0].clamp_(max=vocabulary - 1)


def truncates(sampling: SamplingRecipe) -> bool:
    """Whether tokens of positive probability are never sampled."""
    return sampling.temperature > 0 and bool(sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0)


def truncate(probabilities: torch.Tensor, sampling: Sequence[SamplingRecipe]) -> torch.Tensor:
    """Set `probabilities` [B, V] outside top-k, then top-p, and min-p to zero, row by row, without rescaling.

    top-p keeps the most probable tokens until their sum reaches p, including the token that reaches it. min-p keeps
    tokens of at least min_p times the largest probability. The most probable token is always kept. Among equally
    probable tokens, which are common in bfloat16, the first are kept. Rows need not sum to 1 and are independent of
    each other. The whole vocabulary is sorted only if the `CANDIDATES` most probable tokens do not reach p.
    """
    vocabulary = probabilities.shape[1]
    total = probabilities.sum(-1, keepdim=True)

    def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return upload(torch.tensor(list(values), dtype=dtype), probabilities.device)[:, None]

    ranks = column([s.top_k or vocabulary for s in sampling], torch.int64)
    nuclei = column([s.top_p for s in sampling], torch.float32).to(probabilities.dtype)
    floors = column([s.min_p for s in sampling], torch.float32).to(probabilities.dtype)
    width = min(vocabulary, max(CANDIDATES, *(s.top_k or 0 for s in sampling)))
    if all(not s.top_k and s.top_p == 1 for s in sampling):
        return torch.where(probabilities >= floors * probabilities.amax(-1, keepdim=True), probabilities, 0)
    while True:
        ordered = probabilities.topk(width, sorted=True).values
        ranked = ordered * (torch.arange(width, device=ordered.device)[None] < ranks)
        running = _running_sum(ranked)
        in_ranks = torch.where(ranks < vocabulary, running[:, -1:], total)
        # A row is settled if its last candidate lies beyond top-k or top-p.
        settled = (ranks <= width) | (running[:, -1:] >= nuclei * in_ranks)
        if width == vocabulary or bool(settled.all()):
            break
        width = vocabulary
    keep = (ranked > 0) & ((running - ranked < nuclei * in_ranks) | (nuclei == 1)) & (ranked >= floors * ordered[:, :1])
    keep[:, 0] = True
    count = keep.sum(-1, keepdim=True)
    least = ordered.gather(1, count - 1)
    chosen = probabilities >= least
    if bool((chosen.sum(-1, keepdim=True) > count).any()):
        # The order of equal values in `topk` depends on k, so choose the first ones explicitly.
        free = count - (probabilities > least).sum(-1, keepdim=True)
        equal = probabilities == least
        chosen &= ~equal | (equal.cumsum(-1) <= free)
    return torch.where(chosen, probabilities, 0)


def _running_sum(values: torch.Tensor) -> torch.Tensor:
    """Sums [..., N] of the first 1 to N numbers of each row of `values` [..., N], which are floating-point numbers."""
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return sum_by_products(values)
    return values.cumsum(-1)


def read_later(numbers: torch.Tensor) -> Callable[[], np.ndarray]:
    """Start to copy `numbers` from the device. The function that is returned waits for them, not for later work."""
    copied = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
    copied.copy_(numbers, non_blocking=True)
    done = torch.cuda.Event() if numbers.is_cuda else None
    if done is not None:
        done.record()

    def read() -> np.ndarray:
        if done is not None:
            done.synchronize()
        return copied.numpy()

    return read
