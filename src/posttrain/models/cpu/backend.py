"""CPU backend: matrix products, the fused functions of known decoders, and the C heap.

PyTorch computes float32 products with MKL, which does not use AVX-512 on AMD processors. oneDNN does, and is at least
twice as fast there (Zen 5: 250 against 108 GFLOP/s per core). Without AVX-512, MKL is faster by a tenth to a half
(Zen 3). The processor alone decides which library is used, so it is the same in every run and after every resume on a
machine.

transformers writes norms, gates and rotary positions as chains of small operations. Each operation reads and writes all
activations, and some keep results for the backward pass; on a CPU they cost as much as the matrix products. Here each
is one autograd function that keeps only its inputs. Weights, module names and results (up to rounding) do not change.
"""

import ctypes
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from posttrain.errors import InputError
from posttrain.models.cpu.waiting import wait_by_load

PROCESSORS = Path("/proc/cpuinfo")
KERNELS_KEPT = 128
"""Capacity of oneDNN's cache of compiled products, one per shape. A step of equal shapes needs about thirty."""
ELEMENTS_IN_CACHE = 1 << 17
"""Float32 numbers that a norm processes at a time."""

# -- matrix products ---------------------------------------------------------------------------------------------------


@cache
def prefers_onednn() -> bool:
    """Whether this machine has an AMD processor with AVX-512, and PyTorch has both libraries."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        return "AuthenticAMD" in PROCESSORS.read_text()
    except OSError:
        return False


@cache
def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes matrix products in `dtype` on this processor. In bfloat16 it needs AVX-512 or
    AVX-NE-CONVERT; on other processors PyTorch uses its own kernels. The function tries a small product, because
    ONEDNN_MAX_CPU_ISA can hide instructions that the processor has."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    x = torch.ones(16, 16, dtype=dtype)
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(x, 16)
        torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    except RuntimeError:
        return False
    return True


def prepare_bfloat16() -> None:
    """Make sure that this processor can multiply in bfloat16, natively or by PyTorch's own slow kernels. PyTorch
    selects oneDNN by the processor's name, although ONEDNN_MAX_CPU_ISA may hide the instructions that oneDNN needs;
    every product then fails. Raises `InputError` if products fail without oneDNN as well."""
    if multiplies_bfloat16():
        return
    torch.backends.mkldnn.set_flags(False)
    if not multiplies_bfloat16():
        raise InputError("model.dtype: PyTorch cannot multiply bfloat16 matrices on this processor; use float32")


def multiplies_bfloat16() -> bool:
    """Whether PyTorch can multiply bfloat16 matrices on this processor with its present settings."""
    a = torch.ones(64, 64, dtype=torch.bfloat16)
    try:
        _ = a @ a, torch.bmm(a[None], a[None]), torch.nn.functional.linear(a, a, a[0])
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


# -- fused functions ------------------------------------------------------------------------------------------------------


class RmsNorm(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + epsilon) over the last dimension: Zhang and Sennrich 2019, arXiv 1910.07467."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        kind, size = torch.promote_types(x.dtype, torch.float32), x.shape[-1]
        rows, out = x.reshape(-1, size), torch.empty_like(x, memory_format=torch.contiguous_format)
        inverse = rows.new_empty(len(rows), 1, dtype=kind)
        for part in _parts(rows):
            wide = rows[part].to(kind)
            torch.add(torch.linalg.vecdot(wide, wide)[:, None] / size, epsilon, out=inverse[part]).rsqrt_()
            torch.mul((wide * inverse[part]).to(x.dtype), weight, out=out.view(-1, size)[part])
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        kind, size = inverse.dtype, x.shape[-1]
        rows, above_rows, scale = x.reshape(-1, size), gradient.reshape(-1, size), weight.to(kind)
        x_gradient = torch.empty_like(x, memory_format=torch.contiguous_format)
        weight_gradient = torch.zeros_like(scale) if ctx.needs_input_grad[1] else None
        for part in _parts(rows):
            normal, above = rows[part].to(kind) * inverse[part], above_rows[part].to(kind)
            products = above * normal
            if weight_gradient is not None:
                weight_gradient += products.sum(0)
            along = torch.mv(products, scale)[:, None] / size
            torch.mul(above, scale, out=products).addcmul_(normal, along, value=-1).mul_(inverse[part])
            x_gradient.view(-1, size)[part] = products
        return x_gradient, None if weight_gradient is None else weight_gradient.to(weight.dtype), None


def _parts(rows: torch.Tensor) -> list[slice]:
    """Row slices small enough that intermediate results stay in the processor's cache."""
    count = max(1, ELEMENTS_IN_CACHE // rows.shape[1])
    return [slice(start, start + count) for start in range(0, len(rows), count)]


class Gated(torch.autograd.Function):
    """silu(gate) * up, the gated unit of Shazeer 2020, arXiv 2002.05202."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        gate_gradient = torch.ops.aten.silu_backward(gradient * up, gate)
        return gate_gradient, silu(gate).mul_(gradient)


class Rotary(torch.autograd.Function):
    """Rotary positions (Su et al. 2021, arXiv 2104.09864) of `heads` [..., T, H, D] with `cos`, `sin` [T, 1, D]."""

    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(heads, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(gradient, cos, sin, -1.0), None, None


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: float = 1.0) -> torch.Tensor:
    """Rotate each pair (i, i + D / 2) of `heads` [..., T, H, D] by its angle, backwards with `direction` -1. `cos` and
    `sin` [T, 1, D] have two equal halves."""
    half = heads.shape[-1] // 2
    rotated = heads * cos
    rotated[..., :half].addcmul_(heads[..., half:], sin[..., :half], value=-direction)
    rotated[..., half:].addcmul_(heads[..., :half], sin[..., half:], value=direction)
    return rotated


# -- memory ------------------------------------------------------------------------------------------------------------


def bound_kept_kernels() -> None:
    """Limit the caches of compiled kernels, oneDNN's and the one of PyTorch's layer above it, unless the environment
    already sets their capacities.

    The default of 1,024 kernels, 3 MB each in bfloat16, makes a training run whose row lengths never repeat grow by
    gigabytes. Evicted kernels are compiled again on their next use. Takes effect before the first product.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KERNELS_KEPT))
    os.environ.setdefault("LRU_CACHE_CAPACITY", str(KERNELS_KEPT))


def prepare_process() -> None:
    """Set what speeds up all passes of this process on a CPU: the heap, and how threads wait.

    With the GNU C library, freed blocks of up to 32 MiB, its maximum, stay in the heap. Otherwise the activations of a
    training step are returned to the system at its end and mapped again, page by page and zeroed, in the next one, which
    takes a tenth of the step on a CPU. Peak memory does not change.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(mmap_threshold, 32 << 20)
        mallopt(trim_threshold, -1)
    wait_by_load()
