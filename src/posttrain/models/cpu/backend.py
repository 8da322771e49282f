"""CPU backend: the library for float32 matrix products, oneDNN's kernel cache, and the C heap.

PyTorch computes float32 products with MKL, which on AMD processors runs at half the speed of oneDNN or less (measured
on Zen 5: 108 against 250 GFLOP/s per core). The processor alone decides which library is used, so it is the same in
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
"""Capacity of oneDNN's cache of compiled products, one per shape. A step of equal shapes needs about thirty."""


def bound_kept_kernels() -> None:
    """Limit oneDNN's cache of compiled kernels, unless the environment already sets its capacity.

    The default of 1,024 kernels, 3 MB each in bfloat16, makes a training run whose row lengths never repeat grow by
    gigabytes. Evicted kernels are compiled again on their next use. Takes effect before the first product.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KERNELS_KEPT))


@cache
def prefers_onednn() -> bool:
    """Whether this machine has an AMD processor and PyTorch has both libraries."""
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


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a [M, K] @ b [K, N], without gradient. Returns a new tensor, or `out` [M, N] if it is given and MKL computes."""
    if a.dtype == torch.float32 and a.device.type == "cpu" and prefers_onednn():
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return torch.mm(a, b, out=out)


class OneDnnLinear(torch.nn.Linear):
    """A linear layer that computes its forward and backward products with `matmul`."""

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
        return matmul(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = matmul(gradient, weight) if ctx.needs_input_grad[0] else None
        return grad_x, matmul(gradient.t(), x) if ctx.needs_input_grad[1] else None


TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt` in the GNU C library."""
LARGEST_FROM_HEAP = 32 << 20
"""Bytes: the library's maximum. Larger blocks are always mapped and returned to the system."""


def keep_freed_memory() -> None:
    """Keep freed blocks of up to 32 MiB in the heap of this process instead of returning them to the system.

    Otherwise the activations of a training step are returned at its end and mapped again, page by page and zeroed, in the
    next one: a tenth of the step on a CPU. The peak of memory in use stays the same. No effect without the GNU C library.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGEST_FROM_HEAP)
        mallopt(TRIM_THRESHOLD, -1)
