"""The forward pass of a packed row (`models.packing`), and log-probabilities without full logits."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from posttrain.distributed.world import current_world
from posttrain.errors import InputError
from posttrain.models.cpu.backend import matmul
from posttrain.models.cuda import triton_kernels
from posttrain.models.layers import ATTENTION_NAME, Layout, by_stream, set_lengths

ELEMENTS_IN_CACHE = 1 << 21
"""Float32 logits processed at a time on a CPU, so that softmax and its reductions work in the processor's cache."""
COLUMNS = 256
"""Vocabulary slices are multiples of this."""

# -- forward pass and scores -------------------------------------------------------------------------------------------


def upload(values: Any, device: torch.device) -> torch.Tensor:
    """`values` (an array, a tensor or a list of numbers) as a tensor on `device`; on a CPU it shares the array's
    memory. Copies to a GPU start from pinned memory, so that the CPU does not wait for queued GPU work."""
    tensor = torch.as_tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def transformer(model: torch.nn.Module) -> Any:
    """The transformers model inside `model`, without the peft wrapper; adapters stay in its modules."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


@dataclass(frozen=True)
class ForwardPath:
    """How the forward passes of a loaded model are computed. `models.gate` chooses the fastest exact one."""

    packed: bool = True
    """Whether all streams of a row share a pass. If not, each has one of its own, with the model's own attention."""
    projects: bool = True
    """Whether logits are the output projection of the last hidden states, as `logits_of` computes it. If not, the
    model's own logits take the place of hidden states."""
    attention: str = ATTENTION_NAME
    """The attention implementation of transformers."""
    reason: str = ""
    """Why streams are not packed."""
    nats: float | None = field(default=None, compare=False)
    """Distance per token from transformers' own pass, as `models.gate` has measured it; None if it has not."""


def path_of(model: torch.nn.Module) -> ForwardPath:
    """How the forward passes of `model` are computed: packed, unless `models.gate` has chosen another path."""
    return getattr(transformer(model), "forward_path", ForwardPath())


def routing_of(model: torch.nn.Module) -> Any:
    """The `models.routing.Routing` of `model`; None if it has no routers whose choices can be read."""
    return getattr(transformer(model), "routing", None)


def base_decoder(model: torch.nn.Module) -> Any:
    """The decoder inside `model`, without its output projection."""
    inner = transformer(model)
    return getattr(inner, inner.base_model_prefix, None) or inner.model


def hidden_states(model: torch.nn.Module, ids: torch.Tensor, positions: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Last hidden states [T, hidden] of a row of tokens; `ids` and `positions` are [T] int64."""
    decoder = base_decoder(model)
    if not path_of(model).packed:
        set_lengths(decoder, None)  # the rotary embedding reads the length of each pass
        inner = transformer(model)
        return by_stream(layout, lambda at: alone_output(inner, ids[upload(at, ids.device)], use_cache=False)[0])
    set_lengths(decoder, layout.lengths())
    output = decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False, layout=layout)
    return output.last_hidden_state[0]


def states_at(
    model: torch.nn.Module, ids: torch.Tensor, positions: torch.Tensor, layout: Any, at: torch.Tensor
) -> torch.Tensor:
    """`hidden_states` [n, hidden] at the indices `at` [n] int64 of the row of a `PackedLayout`. Where positions depend
    on the length, a row has its streams once for each length. These are passes one after the other, computed again in
    the backward pass, so memory is that of the largest."""
    # Processes that share a model need as many passes.
    if current_world().sharded or len(parts := layout.parts()) < 2:
        return hidden_states(model, ids, positions, layout)[at]
    outputs, places = [], []
    for start, stop, part in parts:
        place = ((at >= start) & (at < stop)).nonzero()[:, 0]
        inner = (model, ids[start:stop], positions[start:stop], part, at[place] - start)
        outputs.append(checkpoint(states_at, *inner, use_reentrant=False))
        places.append(place)
    return torch.cat(outputs)[torch.cat(places).argsort()]


def alone_output(inner: Any, ids: torch.Tensor, **keywords: Any) -> tuple[torch.Tensor, Any]:
    """Hidden states [T, hidden] of one sequence `ids` [T] int64, or logits [T, V] if the model has no plain projection,
    and the output of the model that is called with `keywords`."""
    projects = path_of(inner).projects
    output = (base_decoder(inner) if projects else inner)(input_ids=ids[None], **keywords)
    return (output.last_hidden_state if projects else output.logits)[0], output


def logits_of(model: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [N, vocabulary] float32 of hidden states [N, hidden], with the model's logit scale and soft cap."""
    inner = transformer(model)
    if not path_of(model).projects:
        return hidden.float()
    head = inner.get_output_embeddings()
    logits = head(hidden.to(head.weight.dtype)).float()  # the last norm of Mamba returns float32
    config = inner.config
    if getattr(config, "logit_scale", None):  # Cohere
        logits = logits * config.logit_scale
    if getattr(config, "logits_scaling", None):  # Granite
        logits = logits / config.logits_scaling
    if getattr(config, "final_logit_softcapping", None):  # Gemma 2
        logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
    return logits


@dataclass(frozen=True)
class TokenScores:
    """Scores of N tokens: `logprobs` [N] and `entropies` [N], float32, in nats."""

    logprobs: torch.Tensor
    entropies: torch.Tensor
    values: torch.Tensor | None = None
    """[N] float32: value of the state before each token is sampled; None without a value head."""
    measured: torch.Tensor | None = None
    """[N] float32: the result of the `TokenMetric` for the distribution of each token; None without a `TokenMetric`."""

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "TokenScores":
        """`function` of each tensor."""
        parts: Any = {name: None if part is None else function(part) for name, part in vars(self).items()}
        return TokenScores(**parts)


TokenMetric = Callable[[torch.Tensor, Any], torch.Tensor]
"""Takes log-probabilities [n, vocabulary] float32 of some of the N tokens, and their positions as a slice or [n] int64;
returns [n]."""


def token_scores(
    model: torch.nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    positions_per_chunk: int,
    measure: TokenMetric | None = None,
) -> TokenScores:
    """Log-probability of each target and entropy of its distribution, softmax(logits / temperature).

    `hidden` [N, hidden] are the states that predict `targets` [N] int64. Temperature 0 (greedy sampling) scores at 1,
    as engines do. Logits exist for `positions_per_chunk` positions at a time and are recomputed in the backward pass.
    `measure` computes one more differentiable number from each distribution.
    """
    divisor = temperature if temperature > 0 else 1.0
    if not len(targets):
        nothing = logits_of(model, hidden).sum(1)  # part of the graph: processes add up their gradients
        return TokenScores(nothing, nothing, measured=None if measure is None else nothing)
    plain = _plain_projection(model)
    if plain is not None and measure is None:
        head, scale = plain
        elements, wide = positions_per_chunk * len(head.weight), isinstance(head, Float32Head)
        hidden = hidden.to(head.weight.dtype)
        return TokenScores(*projected_scores(hidden, head.weight, targets, divisor / scale, elements, wide))

    def score(chunk: torch.Tensor, places: slice) -> tuple[torch.Tensor, ...]:
        logprobs = torch.log_softmax(logits_of(model, chunk) / divisor, dim=-1)
        chosen = logprobs.gather(1, targets[places, None])[:, 0]
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        return (chosen, entropies) if measure is None else (chosen, entropies, measure(logprobs, places))

    parts = []
    for start in range(0, len(targets), positions_per_chunk):
        places = slice(start, min(start + positions_per_chunk, len(targets)))
        chunk = (hidden[places], places)
        parts.append(checkpoint(score, *chunk, use_reentrant=False) if torch.is_grad_enabled() else score(*chunk))
    logprobs, entropies, *measured = (torch.cat(part) for part in zip(*parts, strict=True))
    return TokenScores(logprobs, entropies, measured=measured[0] if measured else None)


def _plain_projection(model: torch.nn.Module) -> tuple[torch.nn.Linear, float] | None:
    """The projection and a scale if logits are just their product with the hidden states; else None."""
    inner = transformer(model)
    if not path_of(model).projects:
        return None
    head, config = inner.get_output_embeddings(), inner.config
    hooked = head._forward_hooks or head._forward_pre_hooks
    if type(head) not in (torch.nn.Linear, Float32Head) or head.bias is not None or hooked:
        return None
    if getattr(config, "final_logit_softcapping", None):
        return None
    return head, (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)


# -- fused output projection -------------------------------------------------------------------------------------------


def projected_scores(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, divisor: float, elements: int, wide: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of `targets` and entropies, [N] float32 each, in nats, of softmax(hidden @ weight.T / divisor).

    `hidden` [N, h] and `weight` [V, h] have the same dtype; `targets` [N] int64. Differentiable in `hidden` and
    `weight`. At most `elements` logits exist at a time, but at least one row of them. `wide`: bfloat16 inputs are
    multiplied in float32, so logits and their gradients are not rounded to bfloat16.
    """
    return _ProjectedScores.apply(hidden, weight, targets, divisor, elements, wide)


class _ProjectedScores(torch.autograd.Function):
    """Products are computed in the dtype of the inputs, or in float32 from them with `wide`; all else in float32."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *how: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        divisor, elements, wide = ctx.how = how
        count, vocabulary = len(hidden), len(weight)
        kind = torch.promote_types(hidden.dtype, torch.float32)
        normalizers, logprobs, entropies = (hidden.new_empty(count, dtype=kind) for _ in range(3))
        chunk = min(count, max(1, elements // vocabulary))
        buffer = hidden.new_empty(0 if wide else chunk, vocabulary)
        for start in range(0, count, chunk):
            stop = min(start + chunk, count)
            logits = _logits(hidden[start:stop], weight, wide, buffer[: stop - start])
            if (kernels := vocabulary_kernels(logits)) is not None:
                rows = slice(start, stop)
                found = kernels.read_rows(logits, targets[rows], divisor)
                normalizers[rows], logprobs[rows], entropies[rows] = found
                continue
            for part in _row_blocks(logits):
                rows = slice(start + part.start, start + part.stop)
                scores = _divided(logits[part].to(kind), divisor)
                probabilities = torch.softmax(scores, -1)
                # The largest probability is 1 / sum exp(score - largest score), which gives the log-sum-exp.
                normalizer = scores.amax(-1) - probabilities.amax(-1).log()
                normalizers[rows] = normalizer
                logprobs[rows] = scores.gather(1, targets[rows, None])[:, 0] - normalizer
                entropies[rows] = normalizer - torch.linalg.vecdot(probabilities, scores)
        ctx.save_for_backward(hidden, weight, targets, normalizers, logprobs, entropies)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, logprobs_gradient: torch.Tensor | None, entropies_gradient: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, normalizers, logprobs, entropies = ctx.saved_tensors
        divisor, elements, wide = ctx.how
        count, vocabulary = len(hidden), len(weight)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        upstream = torch.zeros_like(logprobs) if logprobs_gradient is None else logprobs_gradient
        # d logprob / d score_v = [v is the target] - p_v; d entropy / d score_v = -p_v (log p_v + entropy).
        factor = -upstream / divisor
        at_target = -upstream * torch.expm1(logprobs) / divisor
        slope = None
        if entropies_gradient is not None:
            slope = -entropies_gradient / divisor
            factor = factor - entropies_gradient * entropies / divisor
            at_target = at_target - entropies_gradient * logprobs.exp() * (logprobs + entropies) / divisor
        inputs = hidden.float() if wide else hidden
        hidden_gradient = torch.zeros_like(hidden, dtype=normalizers.dtype) if wants_hidden else None
        weight_gradient = torch.empty_like(weight) if wants_weight else None
        columns = min(vocabulary, max(COLUMNS, elements // count // COLUMNS * COLUMNS))
        buffer = hidden.new_empty(0 if wide else count * columns)
        for start in range(0, vocabulary, columns):
            stop = min(start + columns, vocabulary)
            part = weight[start:stop]
            out = buffer[: count * (stop - start)].view(-1, stop - start)
            logits = _logits(hidden, part, wide, out)
            if (kernels := vocabulary_kernels(logits)) is not None:
                slopes = torch.zeros_like(factor) if slope is None else slope
                kernels.differentiate(logits, targets, divisor, normalizers, factor, slopes, at_target, start)
            else:
                _differentiate(logits, targets - start, divisor, normalizers, factor, slope, at_target)
            # The gradient of the logits has replaced them.
            if hidden_gradient is not None:
                hidden_gradient += matmul(logits, part.to(logits.dtype))
            if weight_gradient is not None:
                columns_gradient = weight_gradient[start:stop]
                result = matmul(logits.t(), inputs, None if wide else columns_gradient)
                if result is not columns_gradient:
                    columns_gradient.copy_(result)
        hidden_gradient = None if hidden_gradient is None else hidden_gradient.to(hidden.dtype)
        return hidden_gradient, weight_gradient, None, None, None, None


def _differentiate(
    logits: torch.Tensor,
    targets: torch.Tensor,
    divisor: float,
    normalizers: torch.Tensor,
    factor: torch.Tensor,
    slope: torch.Tensor | None,
    at_target: torch.Tensor,
) -> None:
    """`models.cuda.vocabulary.differentiate` by operations of torch. `targets` may be outside; `slope` None: 0."""
    # Scatter for all rows, even if the target is in another slice: selecting rows would synchronize a GPU.
    index = targets.clamp(0, logits.shape[1] - 1)[:, None]
    outside = ((targets < 0) | (targets >= logits.shape[1]))[:, None]
    for rows in _row_blocks(logits):
        logs = _divided(logits[rows].to(normalizers.dtype), divisor).sub_(normalizers[rows, None])
        if slope is None:
            gradient = logs.exp_().mul_(factor[rows, None])
        else:
            probabilities = logs.exp()
            gradient = logs.mul_(slope[rows, None]).add_(factor[rows, None]).mul_(probabilities)
        at = index[rows]
        gradient.scatter_(1, at, torch.where(outside[rows], gradient.gather(1, at), at_target[rows, None]))
        if logits.dtype != gradient.dtype:
            logits[rows] = gradient


def vocabulary_kernels(logits: torch.Tensor) -> Any:
    """The module of Triton kernels for `logits`; None for those of a processor, and without Triton."""
    return triton_kernels("vocabulary") if logits.is_cuda and logits.dtype != torch.float64 else None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, wide: bool, out: torch.Tensor) -> torch.Tensor:
    """hidden @ weight.T [N, V]: in float32 if `wide`, else in their dtype, in `out` if possible."""
    return float32_product(hidden, weight) if wide else matmul(hidden, weight.t(), out)


def _row_blocks(logits: torch.Tensor) -> list[slice]:
    """Slices of rows that fit into the processor's cache; all rows on a GPU."""
    rows = max(1, ELEMENTS_IN_CACHE // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    return [slice(start, min(start + rows, len(logits))) for start in range(0, len(logits), rows)]


def _divided(scores: torch.Tensor, divisor: float) -> torch.Tensor:
    """Divide in place; skipped for 1."""
    return scores if divisor == 1.0 else scores.div_(divisor)


def float32_product(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden @ weight.T [N, V] in float32 of `hidden` [N, h] and `weight` [V, h] in bfloat16, without gradient.
    Products of bfloat16 numbers are exact in float32, so on a GPU the matrix units compute it without a copy of the
    weight."""
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    rows, out = hidden.float(), hidden.new_empty(len(hidden), len(weight), dtype=torch.float32)
    for start in range(0, len(weight), COLUMNS):
        stop = start + COLUMNS
        out[:, start:stop] = matmul(rows, weight[start:stop].float().t())
    return out


class Float32Head(torch.nn.Linear):
    """An output projection that multiplies in float32 although its weight is in bfloat16 (`model.head_dtype: float32`).
    Sources: MiniMax 2025, "MiniMax-M1", arXiv 2506.13585, section 3.2; Khatri et al. 2025, "The Art of Scaling
    Reinforcement Learning Compute for LLMs", arXiv 2510.13786, section 3.2."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] float32 of `input` [..., h]."""
        bias = None if self.bias is None else self.bias.float()
        return torch.nn.functional.linear(input.float(), self.weight.float(), bias)


def use_float32_head(model: torch.nn.Module) -> None:
    """Make the output projection of `model` a `Float32Head`, in place. No effect on a float32 model."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head.weight.dtype == torch.float32:
        return
    if type(head) is not torch.nn.Linear:
        raise InputError(
            f"model.head_dtype: float32 needs a linear output projection, and this model has a {type(head).__name__}; "
            "use model.head_dtype=model"
        )
    head.__class__ = Float32Head
