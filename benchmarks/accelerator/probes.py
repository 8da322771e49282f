"""Where the time goes: one kernel with two settings, the optimizer's parts, and the kernels of an update or a decoding step."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from accelerator.decoding import answers, engine_of, random_prompts
from accelerator.measuring import finish, seconds
from accelerator.rows import Row
from accelerator.shapes import RandomPolicy, Shape
from accelerator.training import Training, fitting
from posttrain.models.cuda.attention import Spans, flash_over_cache
from posttrain.recipe.model import OptimizerRecipe
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.training.optimizer import Optimizer

Kernel = Callable[..., torch.Tensor]
LARGEST = 8
"""Kernels of a profile that get a row."""
HEADS = {"0.5B": (14, 2, 64), "4B": (32, 8, 128)}
"""Query heads, key heads, size of a head."""


def dense_over_cache(
    spans: Spans, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, window: int | None
) -> torch.Tensor:
    """`flash_over_cache` for a single query per span, on any device."""
    assert spans.keys_seen is not None
    assert window is None
    repeats, out = query.shape[1] // key.shape[1], torch.empty_like(query)
    for place, (start, count) in enumerate(zip(spans.key_ends[:-1].tolist(), spans.keys_seen.tolist(), strict=True)):
        keys, values = (part[start : start + count].repeat_interleave(repeats, 1) for part in (key, value))
        weights = torch.softmax(torch.einsum("hd,khd->hk", query[place], keys).float() * scaling, -1)
        out[place] = torch.einsum("hk,khd->hd", weights.to(values.dtype), values)
    return out


def single_queries(count: int, room: int, seen: int, device: torch.device) -> Spans:
    """`count` spans of one query over `seen` of `room` keys."""

    def ends(step: int) -> torch.Tensor:
        return torch.arange(count + 1, device=device, dtype=torch.int32) * step

    return Spans(ends(1), ends(room), 1, room, None, torch.full((count,), seen, device=device, dtype=torch.int32))


def attention(device: torch.device, tiny: bool, until: float) -> Iterator[Row]:
    """The kernel of a decoding pass without the mask that one query per sequence does not need, and with it."""
    kernel: Kernel = flash_over_cache if device.type == "cuda" else dense_over_cache
    sizes = ((1, 32), (4, 64)) if tiny else ((1, 8192), (32, 192), (32, 2048), (256, 192), (256, 2048))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    apart = 0.0
    for name, (heads, key_heads, size) in HEADS.items():
        for count, room in sizes:
            query = torch.randn(count, heads, size, device=device, dtype=dtype)
            key, value = (torch.randn(count * room, key_heads, size, device=device, dtype=dtype) for _ in range(2))
            spans = single_queries(count, room, room - room // 8, device)
            # As with a longer query elsewhere in the pass: the kernel masks, and neither packs heads nor splits keys.
            masked = replace(spans, longest_query=2)
            calls = [partial(kernel, each, query, key, value, size**-0.5, None) for each in (spans, masked)]
            plain, other = (call().float() for call in calls)
            apart = max(apart, float((plain - other).abs().max() / plain.abs().max()))
            took = [seconds(call, device, until, 20) for call in calls]
            note = f"with a mask {1e6 * took[1]:.1f} us, {took[1] / took[0]:.1f} times as long"
            yield Row("attention", f"heads of {name}, {count} x {room:,} keys", 1e6 * took[0], "us", note=note)
    yield Row("attention", "largest difference of the two", apart, "relative")


def optimizers(shape: Shape, device: torch.device, until: float) -> Iterator[Row]:
    """Adding up the gradients of a pass, and clipping, AdamW and the copy to the weights, for each type of AdamW."""
    policy = RandomPolicy(shape, device)
    kinds: list[Any] = ["adamw", *(["adamw_8bit"] if device.type == "cuda" else [])]
    for kind in kinds:
        optimizer = Optimizer(policy.trainable(), OptimizerRecipe(type=kind), 1000)

        def collect(optimizer: Optimizer = optimizer) -> None:
            for parameter in optimizer.parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.collect()

        def step(optimizer: Optimizer = optimizer, collect: Callable[[], None] = collect) -> None:
            collect()
            optimizer.step()

        both, alone = seconds(step, device, until), seconds(collect, device, until)
        count = sum(parameter.numel() for parameter in optimizer.parameters)
        for what, value in (("gradients of one pass", alone), ("clipping, AdamW, copy", both - alone)):
            note = f"{1e12 * value / count:.1f} ps a weight"
            yield Row("optimizer", f"{shape.name}, {kind}: {what}", 1000 * value, "ms", note=note)
        optimizer.clear()
        del optimizer


def profile(shape: Shape, device: torch.device, count: int, tokens: int) -> Iterator[Row]:
    """The longest kernels of an optimizer step and of decoding steps with `count` sequences, and the time without any."""
    training = Training(shape, device, fitting(shape, device))
    training.update()
    yield from kernels(f"{shape.name}, update", device, training.update)
    policy = training.policy
    del training
    if device.type == "cuda":
        torch.cuda.empty_cache()
    engine, prompts = engine_of(policy, count), random_prompts(count, 16, shape.vocabulary, "profile")
    for _ in range(3):  # the passes of this size are recorded
        answers(engine, prompts, 12, SamplingRecipe(), "warm")
    case = f"{shape.name}, {tokens} tokens of {count} sequences"
    yield from kernels(case, device, lambda: answers(engine, prompts, tokens, SamplingRecipe(), "profile"))


def kernels(case: str, device: torch.device, work: Callable[[], Any]) -> Iterator[Row]:
    """Rows of the longest kernels (on a processor: operations) of `work`, by share of its time without a profiler."""
    finish(device)
    begun = time.perf_counter()
    work()
    finish(device)
    took = time.perf_counter() - begun
    on_gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], acc_events=True) as recorded:
        work()
        finish(device)
    key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    times = {event.key: getattr(event, key) / 1e6 for event in recorded.key_averages()}
    busy = sum(times.values())
    yield Row("profile", f"{case}, all", 1000 * took, "ms", busy / took, note=f"{len(times)} kinds of kernels")
    for name in sorted(times, key=times.__getitem__, reverse=True)[:LARGEST]:
        yield Row("profile", f"{case}, {name[:60].replace('|', '/')}", 1000 * times[name], "ms", times[name] / took)
