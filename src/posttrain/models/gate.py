"""The exactness gate: which forward pass of a loaded model equals its own, measured on the loaded weights.

A list of families would be wrong for the next one. So short seeded rows are computed by transformers, each alone and with the
attention that it chooses, and by each `ForwardPath` from the fastest to the slowest. The first one that agrees is used; a model
for which none does is refused. Verdicts are kept on disk by weights and version of the code.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.distributed.sharding import compute_dtype
from posttrain.errors import InputError, RunError
from posttrain.models.forward import (
    ForwardPath,
    alone_output,
    base_decoder,
    hidden_states,
    logits_of,
    path_of,
    transformer,
)
from posttrain.models.layers import ATTENTION_NAME, lengths_of, packed_attention
from posttrain.models.packing import pack_row
from posttrain.runs.directory import write_atomically
from posttrain.seeds import random_stream

ROWS = (20, 90, 70)
"""Tokens of the rows that are compared."""
SHARED = 40
"""Tokens that the last two rows have in common."""
WINDOW = 16
"""Sliding windows and attention chunks are shortened to this during the comparison, so that short rows exceed them."""
TIME_STEP = 1.0
"""Limits of the time steps of state spaces are raised to this, so that they apply to many tokens."""
MOST_PARAMETERS = 1 << 31
"""Models with more parameters are compared in their own precision, because a float32 copy of them may not fit."""
_WINDOWS = (
    *("sliding_window", "attention_chunk_size", "window_size"),
    *("local_attention", "attention_window_size", "keep_window_size"),
)


def tolerance(dtype: torch.dtype) -> float:
    """The largest distance, in nats per token, of two exact computations in `dtype`."""
    return 1e-3 if dtype == torch.float32 else 0.5  # twice what rounding to bfloat16 makes of SmolLM2-135M


@dataclass(frozen=True)
class Distance:
    """How far two computations of the same rows are from each other."""

    nats: float
    """Largest root mean square difference, over the vocabulary, of the log-probabilities of a token. Infinite if a row
    has numbers that are not finite."""
    spread: float
    """Standard deviation of log-probabilities over the vocabulary, on average over tokens."""

    def within(self, limit: float) -> bool:
        """Whether it is at most `limit`, or a like share of the spread if that is below one nat."""
        return self.nats <= limit * min(1.0, max(self.spread, 1e-4))


def distance(values: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> Distance:
    """The distance of rows [T_i, D] from their references of the same shapes."""
    pairs = zip(values, references, strict=True)
    differences = [(a.float() - b.float()).square().mean(-1).sqrt().max() for a, b in pairs]
    nats = float(torch.stack(differences).nan_to_num(float("inf")).max())
    return Distance(nats, float(torch.cat(list(references)).float().std(-1).mean()))


def choose_path(model: torch.nn.Module, cache: Path) -> None:
    """Set how the passes of `model`, a model of transformers, are computed; verdicts are kept in the directory `cache`.
    InputError, which names the model type, if no path is exact."""
    key = verdict_key(model)
    if (stored := read_verdict(cache, key, {field.name for field in fields(ForwardPath)})) is None:
        with computing_in_float32(model) as dtype, short_windows(model), torch.no_grad():
            path = _exact_path(model, tolerance(dtype))
        keep_verdict(cache, key, asdict(path))
    else:
        path = ForwardPath(**stored)
    use_path(model, path)


def _exact_path(model: Any, limit: float) -> ForwardPath:
    kind, rows = model.config.model_type, gate_rows(model)
    language = _is_language_model(model)
    refused = f"model.path: {kind} models are not supported"
    default = model.config._attn_implementation
    try:
        # Some models are causal with eager attention alone.
        for attention in (default, "eager"):
            use_path(model, ForwardPath(packed=False, projects=not language, attention=attention))
            references = [_reference(model, row) for row in rows]
            # Scores of the first tokens of a row must be the same without the others.
            row, reference = rows[1], references[1]
            stops = (len(row) // 3, 2 * len(row) // 3, len(row) - 1)
            cuts = [_reference(model, row[:stop]) for stop in stops]
            if causal := distance(cuts, [reference[:stop] for stop in stops]).within(limit):
                break
    except Exception as error:
        cause = f"{type(error).__name__}: {''.join(str(error).strip().splitlines()[:1])}"
        raise InputError(f"{refused}: a plain row of tokens fails ({cause})") from error
    if not all(bool(torch.isfinite(reference).all()) for reference in references):
        raise InputError(f"model.path: outputs of this {kind} model are not finite; restore its weights")
    if not causal:
        raise InputError(f"{refused}: their outputs depend on later tokens; choose a decoder-only model")
    reason = "their attention is not that of transformers' interface"
    for path in (
        ForwardPath(),
        ForwardPath(packed=False, attention=attention),
        *([ForwardPath(packed=False, projects=False, attention=attention)] if language else []),
    ):
        try:
            if not use_path(model, path):
                continue
            measured = distance(_outputs(model, rows), references)
        except Exception as error:
            if path.packed:
                reason = f"their layers do not accept packed rows ({type(error).__name__})"
            continue
        if measured.within(limit):
            return replace(path, reason="" if path.packed else reason, nats=measured.nats)
        if path.packed:
            reason = f"packed rows differ from rows alone by {measured.nats:.2g} nats per token"
    raise InputError(f"{refused}: outputs of this one differ from those of transformers in every forward pass")


def exactness(model: torch.nn.Module) -> str:
    """The distances that the gates of the forward pass and of the local engine have measured, in one sentence; empty without."""
    path, decoding, parts = path_of(model), getattr(transformer(model), "decoding", None), []
    if path.nats is not None:
        parts.append(f"{'packed rows' if path.packed else 'passes'} from transformers by {path.nats:.1g}")
    if decoding is not None:
        parts.append(f"{decoding['kind']} decoding from the learner by {decoding['nats']:.1g}")
    dtype = str(compute_dtype(next(model.parameters()))).removeprefix("torch.")
    return f"exactness, in nats per token: {', '.join(parts)} ({dtype})" if parts else ""


def use_path(model: Any, path: ForwardPath) -> bool:
    """Compute the passes of `model` by `path`. False if the model does not have its attention implementation."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    model.forward_path = path
    if path.attention != model.config._attn_implementation:
        with quiet_transformers():
            model.set_attn_implementation(path.attention)
    return not path.packed or model.config._attn_implementation == ATTENTION_NAME


def _is_language_model(model: Any) -> bool:
    """Whether it predicts tokens. Others, such as reward models, are compared by their hidden states."""
    return getattr(model, "score", None) is None and model.get_output_embeddings() is not None


def _scores(model: Any, states: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [T, V] of the states of a language model; the states of another one."""
    return torch.log_softmax(logits_of(model, states), dim=-1) if _is_language_model(model) else states.float()


def _reference(model: Any, row: torch.Tensor) -> torch.Tensor:
    """Scores of a row by transformers. Where positions depend on the length, each token's are from a pass that ends
    with the tokens of its length."""
    lengths = lengths_of(base_decoder(model))
    spans = [(0, 0, len(row))] if lengths is None else lengths.spans(len(row))
    parts = []
    for _, first, stop in spans:
        states, _ = alone_output(model, row[:stop], use_cache=False)
        parts.append(_scores(model, states)[first:])
    return torch.cat(parts)


def pack_rows(model: Any, rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[np.ndarray]]:
    """Hidden states [T, hidden] of one packed row of all `rows`, and the places of each row's tokens in it."""
    streams = [row.cpu().numpy() for row in rows]
    masks = [np.arange(len(stream)) > 0 for stream in streams]
    row = pack_row(streams, masks, lengths_of(base_decoder(model)))
    device = rows[0].device
    ids, positions = torch.from_numpy(row.ids).to(device), row.layout.positions().to(device)
    return hidden_states(model, ids, positions, row.layout), row.places


def _outputs(model: Any, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Scores of each row, from one call for all of them."""
    states, places = pack_rows(model, rows)
    scores = _scores(model, states)
    return [scores[torch.from_numpy(at).to(scores.device)] for at in places]


# -- what is compared --------------------------------------------------------------------------------------------------


def gate_rows(model: Any) -> list[torch.Tensor]:
    """Seeded rows of token ids [T_i] int64 on the model's device; the second and the third begin with the same tokens. A
    model that reads images adds rows with some."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    first, second, third = (
        random_stream("gate", index).integers(0, vocabulary, count) for index, count in enumerate(ROWS)
    )
    # Texts repeat tokens. Some layers choose between equal keys by their last bits, which depend on the length of a pass.
    second[20:70] = second[random_stream("gate", "repeated").integers(0, 8, 50)]
    # Answers can have any token, and some models count positions without pads.
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    if isinstance(pad, int) and 0 <= pad < vocabulary:
        first[[5, -3]] = second[[8, 50, -4]] = pad
    third[:SHARED] = second[:SHARED]
    device = model.get_input_embeddings().weight.device
    rows = [first, second, third, *getattr(base_decoder(model), "gate_rows", list)()]
    return [torch.from_numpy(row).to(device) for row in rows]


@contextmanager
def computing_in_float32(model: torch.nn.Module) -> Iterator[torch.dtype]:
    """Hold the weights of `model` in float32 inside the block, if they fit; yields the dtype of its computation."""
    tensors = [*model.parameters(), *model.buffers()]
    dtype = next(model.parameters()).dtype
    if sum(tensor.numel() for tensor in tensors) > MOST_PARAMETERS or getattr(model, "is_loaded_in_4bit", False):
        yield dtype
        return
    rounded = [(tensor, tensor.data) for tensor in tensors if tensor.dtype in (torch.bfloat16, torch.float16)]
    try:
        for tensor, data in rounded:
            tensor.data = data.float()
        yield torch.float32
    finally:
        for tensor, data in rounded:
            tensor.data = data


@contextmanager
def short_windows(model: Any) -> Iterator[None]:
    """Shorten sliding windows and attention chunks to `WINDOW` tokens inside the block, so that short rows exceed them,
    and raise the lower limits of time steps to `TIME_STEP`."""
    owners = [model.config, model.config.get_text_config(), *model.modules()]
    kept: list[tuple[Any, str, Any, Any]] = [
        (owner, name, value, WINDOW)
        for owner in owners
        for name in _WINDOWS
        if isinstance(value := getattr(owner, name, None), int) and not isinstance(value, bool) and value > WINDOW
    ]
    # Some caches of transformers ignore these limits.
    kept += [
        (module, "time_step_limit", limit, (TIME_STEP, limit[1]))
        for module in model.modules()
        if (limit := getattr(module, "time_step_limit", None)) and tuple(limit) != (0.0, float("inf"))
    ]
    try:
        for owner, name, _, changed in kept:
            setattr(owner, name, changed)
        yield
    finally:
        for owner, name, value, _ in kept:
            setattr(owner, name, value)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from logging warnings inside the block."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


# -- verdicts on disk --------------------------------------------------------------------------------------------------


def verdict_key(model: torch.nn.Module, *settings: object) -> str:
    """A digest of the model's configuration and weights, and of the code that computes it."""
    inner: Any = transformer(model)
    digest = hashlib.blake2b((_code() + getattr(base_decoder(model), "code", "")).encode(), digest_size=12)
    digest.update(repr((type(inner).__name__, inner.config.to_json_string(use_diff=False), settings)).encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(repr((name, tuple(tensor.shape), tensor.dtype, tensor.device.type)).encode())
        # Sums of the bits of all rows and of all columns, in their order: a hash of all bytes would take much longer.
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        bits = tensor.detach().contiguous().view(integers[tensor.element_size()])
        sums = [bits.flatten().long()]
        if bits.dim() > 1:
            sums = [bits.flatten(1).sum(side, dtype=torch.int64) for side in (0, 1)]
        # A copy: FSDP frees the storage of weights, and numpy would hold it.
        digest.update(torch.cat(sums).to("cpu", copy=True).numpy().tobytes())
    return digest.hexdigest()


@cache
def _code() -> str:
    """The versions of torch and transformers, and the source of models and of the local engine."""
    digest = hashlib.blake2b(repr([version(name) for name in ("torch", "transformers", "peft")]).encode())
    package = Path(__file__).parents[1]
    for folder in ("models", "engines/local"):
        for file in sorted((package / folder).rglob("*.*")):
            if file.suffix in (".py", ".cpp", ".h"):
                digest.update(file.read_bytes())
    return digest.hexdigest()


def read_verdict(cache: Path, key: str, names: set[str]) -> dict[str, Any] | None:
    """What `keep_verdict` wrote for `key`; None if it wrote nothing, or if the file does not have these `names`."""
    try:
        stored = json.loads((cache / f"{key}.json").read_text())
    except (OSError, ValueError):
        return None
    return stored if isinstance(stored, dict) and set(stored) == names else None


def keep_verdict(cache: Path, key: str, verdict: dict[str, Any]) -> None:
    """Write `verdict` for later loads. A directory that cannot be written to only costs time."""
    with suppress(RunError):
        write_atomically(cache / f"{key}.json", json.dumps(verdict))
