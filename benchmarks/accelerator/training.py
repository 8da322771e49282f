"""Supervised training and log-probabilities: tokens per second, model FLOPs utilisation, time and memory."""

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from harness.flops import Tokens, training_flops
from harness.limits import Limits

from accelerator.measuring import data_sheet, peak_memory, seconds
from accelerator.rows import PLAN, Row
from accelerator.shapes import RandomPolicy, Shape
from posttrain.distributed import world
from posttrain.episode import Stream
from posttrain.models import forward
from posttrain.models.forward import TokenScores, logits_of, token_scores
from posttrain.models.layers import use_fused_layers
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.model import LearnerRecipe, LoraRecipe, OptimizerRecipe
from posttrain.seeds import random_stream
from posttrain.training.objectives import SupervisedObjective, token_forward
from posttrain.training.optimizer import Optimizer
from posttrain.training.updater import Sample, Updater

MICRO_BATCHES = 4
"""Forward passes for one optimizer step."""
CHUNK = 2048
"""Positions whose logits exist at one time."""
FRAGMENTS = 2**30
"""Bytes lost to fragmentation, which plans do not count."""


@dataclass(frozen=True)
class Setting:
    """How an update fits into the device's memory."""

    tokens: int
    """In one forward pass."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    checkpointing: bool = False
    offload: Literal["none", "optimizer"] = "none"
    lora: bool = False
    four_bit: bool = False

    def __str__(self) -> str:
        words = [f"{self.tokens:,} tokens a pass"]
        words += ["8-bit AdamW"] if self.optimizer == "adamw_8bit" else []
        words += ["gradient checkpointing"] if self.checkpointing else []
        words += ["LoRA" + (" on 4-bit weights" if self.four_bit else "")] if self.lora else []
        words += ["AdamW in CPU memory"] if self.offload == "optimizer" else []
        return ", ".join(words)


def settings_of(shape: Shape, device: torch.device, mode: str = "") -> list[Setting]:
    """Settings to try in this order until one fits into the device's memory. `mode`: `lora`, `qlora`, or all weights."""
    most = shape.tokens_per_batch
    four_bit = mode == "qlora" and device.type == "cuda"
    if device.type != "cuda":
        return [Setting(most, lora=bool(mode))]
    if mode:
        tried = [(tokens, checkpointing) for checkpointing in (False, True) for tokens in (16_384, 8192, 4096, 2048)]
        return [Setting(tokens, "adamw", checkpointing, "none", True, four_bit) for tokens, checkpointing in tried]
    halves = [most]
    while halves[-1] > 2048:
        halves.append(halves[-1] // 2)
    kinds: list[Literal["adamw", "adamw_8bit"]] = ["adamw", "adamw_8bit"]
    settings = [Setting(tokens, kind) for tokens in halves for kind in kinds]
    settings += [Setting(most, kind, checkpointing=True) for kind in kinds]
    settings += [Setting(tokens, offload="optimizer") for tokens in halves]
    return [*settings, Setting(most, checkpointing=True, offload="optimizer")]


def fitting(shape: Shape, device: torch.device, mode: str = "") -> Setting:
    """The first setting whose plan leaves a fifth of the free memory for an engine."""
    settings = settings_of(shape, device, mode)
    if device.type != "cuda":
        return settings[0]
    most = 0.8 * torch.cuda.mem_get_info(device)[0]
    return next((setting for setting in settings if planned_bytes(shape, setting) < most), settings[-1])


def planned_bytes(shape: Shape, setting: Setting) -> float:
    """The peak that `--dry-run` plans for the update of a bfloat16 model."""
    from posttrain.planning.memory import memory_estimate
    from posttrain.recipe.model import ModelRecipe
    from posttrain.recipe.stages import SftRecipe

    settings: Any = {"environment": {"type": "bandit"}}
    recipe = SftRecipe(
        model=ModelRecipe(
            dtype="bfloat16",
            gradient_checkpointing=setting.checkpointing,
            lora=LoraRecipe() if setting.lora else None,
            load_in_4bit=setting.four_bit,
        ),
        optimizer=OptimizerRecipe(type=setting.optimizer),
        learner=LearnerRecipe(tokens_per_batch=setting.tokens, logits_per_chunk=CHUNK),
        hardware=HardwareRecipe(offload=setting.offload),
        **settings,
    )
    return float(sum(count for count, _ in memory_estimate(recipe, shape).values()))


def samples_of(lengths: Sequence[int], prompt_share: float, vocabulary: int, seed: int) -> list[Sample]:
    """Streams of random tokens, each with its own prompt and an answer that is trained on."""
    random = random_stream(seed, "benchmark streams")
    found = []
    for number, length in enumerate(lengths):
        sampled = np.arange(length) >= max(1, round(prompt_share * length))
        nothing = np.zeros(length, dtype=np.float32)
        stream = Stream(
            random.integers(3, vocabulary, length), sampled, nothing, nothing, *[np.full(length, -1, np.int32)] * 2
        )
        found.append(Sample(stream, f"row {number}", np.ones(int(sampled.sum()), dtype=np.float32)))
    return found


def row_lengths(tokens: int, longest: int, seed: int) -> list[int]:
    """Lengths of rows that add up to `tokens` or a little less: lognormal with median 500 and sigma 0.6."""
    random = random_stream(seed, "benchmark lengths")
    found: list[int] = []
    while True:
        length = int(np.clip(round(500 * np.exp(0.6 * random.standard_normal())), 8, longest))
        if sum(found) + length > tokens:
            return found
        found.append(length)


class Training:
    """Optimizer steps of the product's learner on random rows."""

    def __init__(self, shape: Shape, device: torch.device, setting: Setting) -> None:
        self.shape = shape
        self.policy = RandomPolicy(shape, device, setting.checkpointing, setting.lora, setting.four_bit)
        recipe = LearnerRecipe(tokens_per_batch=setting.tokens, logits_per_chunk=CHUNK)
        self.learner: Any = Updater(
            self.policy,
            Optimizer(self.policy.trainable(), OptimizerRecipe(type=setting.optimizer), 1000),
            recipe,
            token_forward(self.policy, recipe),
        )
        # A little less than the budgets together, so that rows fit into as many forward passes.
        lengths = row_lengths(int(0.95 * MICRO_BATCHES * setting.tokens), min(4096, setting.tokens // 2), 0)
        self.samples = samples_of(lengths, 0.3, shape.vocabulary, 0)
        self.tokens = sum(lengths)
        pairs = sum(length * (length + 1) / 2 for length in lengths)
        work = Tokens(self.tokens, pairs, sum(sample.sampled_tokens for sample in self.samples))
        self.flops = training_flops(shape, work, frozen=setting.lora)

    def update(self) -> None:
        totals = self.learner.update(self.samples, SupervisedObjective())
        if totals["optimizer/skipped"][0]:
            raise RuntimeError("; ".join(self.learner.take_warnings()))


def supervised(
    shape: Shape, device: torch.device, limits: Limits, until: float, setting: Setting, fused: str = "own"
) -> Iterator[Row]:
    """Whole optimizer steps: packing, forward and backward passes, clipping, AdamW on float32 masters.

    `fused`: as `model.fused`, `own` without Liger's kernels. The rows come without padding, so every token is real.
    """
    with mock.patch.dict(world._state, {"world": world.World(HardwareRecipe(offload=setting.offload))}):
        training = Training(shape, device, setting)
        use_fused_layers(training.policy.model, fused)  # type: ignore[arg-type]
        training.update()  # allocates what later updates reuse
        held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        peak = held + peak_memory(training.update, device)
        step = seconds(training.update, device, until, warmup=0)
    rate = training.flops / step
    sheet = data_sheet(device)
    note = f"{rate / 1e12:.0f} TFLOP/s, {rate / limits.products:.0%} of the measured product, layers: {fused}"
    share = rate / (limits.products if np.isnan(sheet) else sheet)
    yield Row("SFT", f"{shape.name}, {setting}", training.tokens / step, "tokens/s", share, peak, note)
    if device.type == "cuda":
        plan = planned_bytes(shape, setting)
        note = f"planned {plan / 2**30:.1f} GiB"
        yield Row("SFT", f"{shape.name}, peak memory", peak / plan, PLAN, memory=peak, note=note)


def supervised_that_fits(
    shape: Shape, device: torch.device, limits: Limits, until: float, fused: str = "own", mode: str = ""
) -> Iterator[Row]:
    """`supervised` with the first setting that fits into the device's memory. Settings whose plans do not are skipped."""
    least = ""
    for setting in settings_of(shape, device, mode):
        if device.type == "cuda":
            # Frees the model of the previous setting, which did not fit.
            gc.collect()
            torch.cuda.empty_cache()
            if planned_bytes(shape, setting) > torch.cuda.mem_get_info(device)[0] - FRAGMENTS:
                continue
        least = str(setting)
        try:
            yield from supervised(shape, device, limits, until, setting, fused)
            return
        except torch.OutOfMemoryError:
            if time.monotonic() > until:
                break
    raise RuntimeError(f"no setting fits into the memory; the last one tried: {least or 'none, by their plans'}")


def log_probabilities(shape: Shape, device: torch.device, positions: int, until: float) -> Iterator[Row]:
    """Log-probabilities and entropies of `positions` tokens, forward and backward: chunks against full logits, and against the
    loss alone of Liger and of cut-cross-entropy where they are installed."""
    small = replace(shape, layers=1, intermediate=64, heads=4, key_value_heads=2, head_size=8)
    model = RandomPolicy(small, device).model
    hidden = torch.randn(positions, shape.hidden, device=device, dtype=next(model.parameters()).dtype)
    hidden.requires_grad_()
    targets = torch.randint(3, shape.vocabulary, (positions,), device=device)

    def backward(scores: TokenScores) -> None:
        (scores.logprobs.mean() + 0.01 * scores.entropies.mean()).backward()
        hidden.grad = None
        model.zero_grad()

    def chunked() -> None:
        backward(token_scores(model, hidden, targets, 1.0, CHUNK))

    def plain() -> None:
        logprobs = torch.log_softmax(logits_of(model, hidden), dim=-1)
        chosen = logprobs.gather(1, targets[:, None])[:, 0]
        backward(TokenScores(chosen, -(logprobs.exp() * logprobs).sum(-1)))

    def liger() -> None:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        LigerFusedLinearCrossEntropyLoss()(model.get_output_embeddings().weight, hidden, targets).backward()

    def cut() -> None:
        from cut_cross_entropy import linear_cross_entropy

        linear_cross_entropy(hidden, model.get_output_embeddings().weight, targets).backward()

    def separate() -> None:
        with mock.patch.object(forward, "vocabulary_kernels", return_value=None):
            chunked()

    ways = [("in chunks, ours", chunked), ("full logits, plain", plain)]
    if device.type == "cuda":
        ways.append(("in chunks, without Triton", separate))
        peers = (("liger_kernel", "loss alone, Liger", liger), ("cut_cross_entropy", "loss alone, cut", cut))
        ways += [(name, work) for package, name, work in peers if find_spec(package) is not None]
    for name, work in ways:
        hidden.grad = None
        model.zero_grad()
        peak = peak_memory(work, device)
        took = seconds(work, device, until)
        case = f"{positions:,} x {shape.vocabulary:,} x {shape.hidden:,}, {name}"
        yield Row("log-probabilities", case, 1000 * took, "ms", memory=peak)
