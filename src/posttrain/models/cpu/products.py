"""Matrix products in float32 on processors that MKL is slow on.

PyTorch computes float32 products with MKL, which on AMD processors runs at half the speed of oneDNN or less (measured
on Zen 5: 108 against 250 GFLOP/s a core). Which library is taken depends on the processor alone, so it is the same in
every run and after every resume on a machine.
"""

import ctypes
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.autograd.function import once_differentiable

PROCESSORS = Path("/proc/cpuinfo")
KERNELS_KEPT = 128
"""Compiled products of oneDNN that are kept, each for one shape; a step of equal shapes needs about thirty."""


def bound_kept_kernels() -> None:
    """Let oneDNN keep few of the kernels that it compiles for each new shape, unless the user says how many.

    It keeps 1,024, in bfloat16 of 3 MB each, so that a training whose rows are never twice of one length grew by
    gigabytes. What is thrown away is compiled again where its shape comes back. Takes effect before the first product.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KERNELS_KEPT))


@cache
def prefers_onednn() -> bool:
    """Whether this machine's processor is AMD's, and both libraries are there."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and PROCESSORS.exists()):
        return False
    return "AuthenticAMD" in PROCESSORS.read_text() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@cache
def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes matrix products in `dtype` on this processor.

    In bfloat16 it needs AVX-512 or AVX-NE-CONVERT; on other processors PyTorch has kernels of its own. A small product
    decides, because ONEDNN_MAX_CPU_ISA can hide instructions that the processor has.
    """
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    x = torch.ones(16, 16, dtype=dtype)
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(x, 16)
        torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    except RuntimeError:
        return False
    return True


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a [M, K] @ b [K, N], without gradient. The result is in `out` [M, N], where that is given, or is a new tensor."""
    if a.dtype == torch.float32 and a.device.type == "cpu" and prefers_onednn():
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return torch.mm(a, b, out=out)


class OneDnnLinear(torch.nn.Linear):
    """A linear layer whose products, forward and backward, are `product`s."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.dtype != torch.float32 or input.device.type != "cpu":
            return super().forward(input)
        out = _Linear.apply(input.flatten(0, -2), self.weight)
        out = out if self.bias is None else out + self.bias
        return out.unflatten(0, input.shape[:-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x = product(gradient, weight) if ctx.needs_input_grad[0] else None
        return of_x, product(gradient.t(), x) if ctx.needs_input_grad[1] else None


TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt` in the GNU C library."""
LARGEST_FROM_HEAP = 32 << 20
"""Bytes: the most that the library allows; larger blocks always go back to the system."""


def keep_freed_memory() -> None:
    """From here on, blocks of up to 32 MiB come from the heap, and what is freed of the heap stays there.

    Otherwise the activations of a training step go back to the system at its end, and are handed out page by page,
    each cleared first, in the next one: on a CPU that was a tenth of the step. The most memory that is ever in use is
    the same. Does nothing where the C library is not GNU's.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGEST_FROM_HEAP)
        mallopt(TRIM_THRESHOLD, -1)
