"""Clocks, memory and the limits of the device."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from harness.limits import Limits

DATASHEET = {"H100": 989e12, "H200": 989e12, "GH200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
"""Dense bfloat16 FLOP/s by the vendor's data sheet, for parts whose name holds the key."""


def finish(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], Any], device: torch.device, until: float, repeats: int = 5, warmup: int = 2) -> float:
    """Median seconds of `work` over up to `repeats` calls after `warmup`, one at least, none begun after `until`
    (of `time.monotonic`).
    """
    for _ in range(warmup):
        work()
    finish(device)
    found: list[float] = []
    while len(found) < repeats and (not found or time.monotonic() < until):
        begun = time.perf_counter()
        work()
        finish(device)
        found.append(time.perf_counter() - begun)
    return median(found)


def peak_memory(work: Callable[[], Any], device: torch.device) -> float:
    """Bytes that `work` takes at most beyond what is held before it; NaN on a processor, which does not count them."""
    if device.type != "cuda":
        work()
        return float("nan")
    finish(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    finish(device)
    return float(torch.cuda.max_memory_allocated(device) - before)


def measure_limits(device: torch.device, tiny: bool, until: float) -> Limits:
    """The device's limits: products of 8192 x 8192 random matrices, and a copy of 4 GiB, whose bytes are read and written."""
    side, size = (256, 1 << 20) if tiny else (8192, 1 << 32)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    product = seconds(lambda: torch.mm(left, right, out=out), device, until, repeats=20, warmup=5)
    source = torch.ones(size, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source), device, until, repeats=20, warmup=3)
    return Limits(products=2 * side**3 / product, reading=2 * size / copy)


def data_sheet(device: torch.device) -> float:
    """The vendor's dense bfloat16 FLOP/s; NaN for a part that is not listed."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in DATASHEET.items() if part in name), float("nan"))
