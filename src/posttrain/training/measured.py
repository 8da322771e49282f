"""The precision and the number of threads of a run on a CPU, chosen by timing what the run will compute.

One layer of the model, with a part of its vocabulary, is timed as the run computes it: a packed forward and backward pass,
the output projection, AdamW, and decoding by the local engine. The times are added up to those of a whole update. Choices
are kept on disk by machine, versions and shapes, so every run of a model on a machine makes the same one.
"""

import copy
import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from posttrain.engines.local.cache import CachedLayout, KeyValuePages, Segment
from posttrain.engines.local.decoder import decoder_of
from posttrain.models.adapters import add_adapters
from posttrain.models.cpu.backend import bound_kept_kernels, multiplies_bfloat16, prepare_process
from posttrain.models.forward import ForwardPath, base_decoder, hidden_states, token_scores
from posttrain.models.gate import keep_verdict, read_verdict, use_path
from posttrain.models.layers import lengths_of, resolve_fused, use_fused_layers, use_positions_by_length
from posttrain.models.load import load_config
from posttrain.models.packing import pack_row
from posttrain.plugins import model_family
from posttrain.recipe.model import ModelRecipe, OptimizerRecipe
from posttrain.runs.directory import cache_directory
from posttrain.runs.machine import processor, usable_processors
from posttrain.seeds import random_stream
from posttrain.training.optimizer import Optimizer

UPDATE = 2048
"""Tokens of the update that is estimated. In runs that sample, each of them is sampled as well."""
SIZES = (64, 512)
"""Tokens of the timed forward and backward pass: to leave out candidates that are far slower, and to compare the others."""
LARGEST_LAYER = 1 << 23
"""Parameters of a layer above which the pass has fewer tokens, in proportion."""
ROWS, CONTEXT = 16, 64
"""Sequences that a timed pass of the engine extends by a token, and the tokens of each before it."""
VOCABULARY = 2048
"""Tokens of the part of the vocabulary. The products with the output projection take time in proportion."""
ROUNDS, LIMIT = 5, 0.4
"""Number of times that candidates are timed in turn, and the seconds after which no further round starts."""
HOPELESS = 3.0
"""Candidates that are slower than the fastest by this factor are not timed again."""
MARGIN = 1.03
"""The first candidate is kept unless another is faster by this factor."""
RUNNING = Path("/proc/loadavg")
SAMPLES, INTERVAL = 30, 0.01
"""How often running processes are counted, and the seconds between counts."""

Candidate = tuple[str, int]
"""A precision and a number of threads."""


def busy_processors() -> float:
    """The number of other threads of this machine that run or wait for a processor: median over 0.3 s. 0 if unknown."""
    counts = []
    try:
        for _ in range(SAMPLES):
            running = RUNNING.read_text().split()[3].partition("/")[0]
            counts.append(int(running) - 1)
            time.sleep(INTERVAL)
    except (OSError, ValueError, IndexError):
        return 0.0
    return float(median(counts))


def thread_counts(busy: float) -> list[int]:
    """The numbers of threads to compare while `busy` other threads run, torch's own first: halves of it, and the number of
    free processors. `OMP_NUM_THREADS`, if set, is kept.

    Every parallel loop waits for its last thread. If other processes occupy the processors, a thread is often suspended for
    milliseconds while the others wait, and small models compute for less time than threads need to start.

    `busy` counts the whole machine. If this process may use only some of its processors, the busy threads may be on
    these or on others, so all are subtracted, and the comparison decides.
    """
    every = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ:
        return [every]
    free = max(1, int(len(usable_processors()) - busy))
    fewer = {every >> power for power in range(1, every.bit_length())} | {min(free, every)}
    return [every, *sorted(fewer - {every}, reverse=True)]


def choose(model: ModelRecipe, counts: Sequence[int], learns: bool, samples: bool, keep: bool = True) -> dict[str, Any]:
    """The fastest `dtype` and number of `threads` of `counts`, with the `seconds` of an update for each candidate.

    The dtype is that of `model`, or the faster one for `auto`. `learns`, `samples`: what the run does with the model.
    `keep`: read and write the choices on disk. Raises what loading the model's configuration raises, and any exception for
    a model that cannot be timed.
    """
    bound_kept_kernels()
    config = load_config(model)
    dtypes: list[str] = [model.dtype or "float32"]
    if model.dtype == "auto":
        dtypes = ["float32", *(["bfloat16"] if multiplies_bfloat16() else [])]
    # The machine, the versions, the limits of the environment, and the shapes.
    limits = ("OMP_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_", "POSTTRAIN_KERNEL")
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith(limits))
    machine = (processor(), len(usable_processors()), torch.backends.cpu.get_cpu_capability(), variables)
    versions = [version(name) for name in ("posttrain", "torch", "transformers")]
    values = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
    shapes = (sorted(values.items()), model.model_dump_json(include={"lora"}))
    given = (machine, versions, shapes, (dtypes, counts, learns, samples))
    key, cache = hashlib.blake2b(repr(given).encode(), digest_size=12).hexdigest(), cache_directory() / "measured"
    stored = read_verdict(cache, key, {"dtype", "threads", "seconds"}) if keep else None
    if stored and stored["dtype"] in dtypes and stored["threads"] in counts and isinstance(stored["seconds"], dict):
        return stored
    passes: dict[str, Passes] = {}
    every = torch.get_num_threads()

    def seconds(candidate: Candidate, tokens: int) -> float:
        dtype, threads = candidate
        torch.set_num_threads(threads)
        if dtype not in passes:
            passes[dtype] = Passes(model, config, getattr(torch, dtype), learns, samples)
        return passes[dtype].seconds(tokens)

    try:
        with torch.random.fork_rng(devices=[]):
            found = compare(dtypes, counts, seconds)
    finally:
        torch.set_num_threads(every)
    dtype, threads = fastest(found)
    about = {f"{one} with {count} thread{'s' * (count > 1)}": spent for (one, count), spent in found.items()}
    about = {how: spent for how, spent in about.items() if spent < math.inf}
    chosen = {"dtype": dtype, "threads": threads, "seconds": about}
    if keep:
        keep_verdict(cache, key, chosen)
    return chosen


def compare(
    dtypes: Sequence[str], counts: Sequence[int], seconds: Callable[[Candidate, int], float]
) -> dict[Candidate, float]:
    """Candidate -> least of the numbers that `seconds(candidate, tokens)` has returned, timed in turn; infinite for those
    that are hopelessly slow."""
    few, many = SIZES
    # The first pass also starts threads and compiles products.
    first = {dtype: [seconds((dtype, counts[0]), few) for _ in range(2)][1] for dtype in dtypes}
    found = {(dtype, count): math.inf for count in counts for dtype in dtypes}
    timed = [one for one in found if first[one[0]] <= HOPELESS * min(first.values())]
    began = time.perf_counter()
    for _ in range(ROUNDS):
        for one in timed:
            found[one] = min(found[one], seconds(one, many))
        timed = [one for one in timed if found[one] <= HOPELESS * min(found.values())]
        if len(timed) == 1 or time.perf_counter() - began > LIMIT:
            break
    return found


def fastest(found: dict[Candidate, float]) -> Candidate:
    """The candidate with the least seconds; the first one if it is nearly as fast."""
    first, best = next(iter(found)), min(found, key=lambda one: found[one])
    return first if found[first] <= MARGIN * found[best] else best


class Passes:
    """One layer of a model with arbitrary weights, whose passes are timed."""

    def __init__(self, model: ModelRecipe, config: Any, dtype: torch.dtype, learns: bool, samples: bool) -> None:
        from transformers import AutoModelForCausalLM

        prepare_process()
        family, config = model_family(config.model_type, model.path), copy.deepcopy(config.get_text_config())
        config = config if family is None else family.language_model(config)
        self.layers, self.vocabulary = config.num_hidden_layers, config.vocab_size
        config.num_hidden_layers, config.vocab_size, config.pad_token_id = 1, min(VOCABULARY, self.vocabulary), None
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:1]
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self.model: Any = empty.to_empty(device="cpu").eval()
        self.model.tie_weights()
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if tensor.is_floating_point():
                tensor.data.fill_(0.02) if tensor.numel() > LARGEST_LAYER else tensor.data.uniform_(-0.03, 0.03)
            else:
                tensor.data.zero_()
        if not use_path(self.model, ForwardPath()):
            raise ValueError("the layers do not accept packed rows")
        use_positions_by_length(base_decoder(self.model))
        use_fused_layers(self.model, resolve_fused("auto", torch.device("cpu")))
        of_layers = sum(p.numel() for p in base_decoder(self.model).layers.parameters())
        rest = sum(p.numel() for p in self.model.parameters()) - of_layers
        self.part = config.vocab_size / self.vocabulary
        self.sizes = {size: max(SIZES[0], int(size * min(1.0, LARGEST_LAYER / of_layers))) for size in SIZES}
        self.weights = (self.layers * of_layers + rest / self.part) / (of_layers + rest)
        self.learns, self.samples, self.tokens = learns, samples, config.vocab_size
        if samples:
            self.decoder, self.cache = decoder_of(self.model), KeyValuePages(ROWS)
            self._decode(0, CONTEXT)
        if learns:
            if model.lora is not None:
                self.model = add_adapters(self.model, model.lora, "CAUSAL_LM").eval()
            trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
            self.optimizer = Optimizer(trained, OptimizerRecipe(), 1)

    def seconds(self, tokens: int) -> float:
        """Seconds of an update of the whole model, from one pass with `tokens` tokens, or fewer for large layers."""
        total = 0.0
        if self.samples:
            decoding, logits = self._decode(CONTEXT, 1)
            total += UPDATE / ROWS * (self.layers * decoding + logits / self.part)
        if self.learns:
            count = self.sizes[tokens]
            passing, projecting, updating = self._update(count)
            total += UPDATE / count * (self.layers * passing + projecting / self.part) + self.weights * updating
        return total

    def _update(self, tokens: int) -> tuple[float, float, float]:
        """Seconds of the layer, of the output projection, and of the optimizer."""
        ids = random_stream("measured", tokens).integers(0, self.tokens, tokens)
        streams = np.split(ids, [tokens // 2, tokens * 4 // 5])
        row = pack_row(
            streams, [np.arange(len(s)) > len(s) // 3 for s in streams], lengths_of(base_decoder(self.model))
        )
        places, targets = torch.from_numpy(row.predictors), torch.from_numpy(row.targets)
        inputs = torch.from_numpy(row.ids), row.layout.positions(), row.layout
        times = [time.perf_counter()]
        states = hidden_states(self.model, *inputs)
        states.backward(torch.full_like(states, 1e-3))
        times.append(time.perf_counter())
        read = states.detach()[places].requires_grad_()
        token_scores(self.model, read, targets, 1.0, len(targets)).logprobs.mean().backward()
        times.append(time.perf_counter())
        self.optimizer.collect()
        self.optimizer.step()
        times.append(time.perf_counter())
        passing, projecting, updating = np.diff(times)
        return float(passing), float(projecting), float(updating)

    @torch.no_grad()
    def _decode(self, start: int, count: int) -> tuple[float, float]:
        """Seconds of the layer, and of the logits, for `count` tokens of each sequence after its first `start`."""
        layout = CachedLayout(self.cache, [Segment(slot, start, count) for slot in range(ROWS)], torch.device("cpu"))
        positions = torch.arange(start, start + count).repeat(ROWS)
        began = time.perf_counter()
        states = self.decoder.hidden(positions % self.tokens, positions, layout)
        between = time.perf_counter()
        self.decoder.logits(states[-ROWS:])
        return between - began, time.perf_counter() - between
