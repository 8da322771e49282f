"""Layers for sampling on a CPU: linear modules as one product with packed weights, and all layers in one compiled call."""

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear, pad, silu

from posttrain.distributed.world import current_world
from posttrain.engines.local.cache import CachedLayout
from posttrain.engines.local.cpu.kernel import DecodingKernel
from posttrain.models.cpu.backend import onednn_multiplies
from posttrain.models.cpu.compiler import TYPES, compiled

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
SOURCE = Path(__file__).with_name("products.cpp")
VECTORS, PAIRS, TILES = range(3)
"""Units of a processor: for sums of products in float32, for dot products of pairs in bfloat16, and for tiles of them (AMX)."""
ROWS = 32
"""Number of rows that oneDNN's layout is optimized for. Results are the same for any number, nearly as fast."""

Product = Callable[[torch.Tensor, str, torch.Tensor | None], torch.Tensor]
"""`product(x, then, other)`: the product [T, out] for `x` [T, in], then `none`, `silu`, or `times` or `plus` `other`
[T, out]."""


# -- products with packed weights -------------------------------------------------------------------------------------


class OneDnnProduct:
    """The product with `weight` [out, in] and `bias` [out] by oneDNN. Weights are copied into its layout. Otherwise
    every call would repeat that copy, which makes products of decoding size about twice as slow."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed, self._bias = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS), bias

    def __call__(self, x: torch.Tensor, then: str, other: torch.Tensor | None = None) -> torch.Tensor:
        if other is not None:
            operation = {"times": "mul", "plus": "add"}[then]
            return torch.ops.mkldnn._linear_pointwise.binary(x, other.contiguous(), self._packed, self._bias, operation)
        operation = {"silu": "swish"}.get(then, then)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, operation, [], "")


class _Product(ctypes.Structure):
    _fields_ = [("panels", _POINTER), ("bias", _POINTER), ("inputs", _SIZE), ("outputs", _SIZE)]


class CompiledProduct:
    """The product with `weight` [out, in] and `bias` [out] by `products.cpp`, compiled as `library`."""

    THEN = ("none", "silu", "times", "plus")

    def __init__(self, library: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.multiply = library.multiply
        self.multiply.argtypes = [*[_POINTER] * 6, _SIZE, ctypes.c_int, ctypes.c_int]
        self.multiply.restype = None
        self.outputs, self.inputs = weight.shape
        columns = library.columns()
        panels = pad(weight, (0, 0, 0, -len(weight) % columns)).unflatten(0, (-1, columns))
        panels = panels.unflatten(2, (-1, 2)) if weight.dtype == torch.bfloat16 else panels
        self.panels = panels.transpose(1, 2).contiguous()
        self.bias = None if bias is None else pad(bias.float(), (0, -len(weight) % columns))
        pointer = None if self.bias is None else self.bias.data_ptr()
        self.weights = _Product(self.panels.data_ptr(), pointer, self.inputs, self.outputs)

    def __call__(self, x: torch.Tensor, then: str, other: torch.Tensor | None = None) -> torch.Tensor:
        if x.dtype != self.panels.dtype or (other is not None and other.dtype != x.dtype):
            # The library gets pointers, and would read and write beyond the end of a tensor of another dtype.
            given = x.dtype if other is None or x.dtype != self.panels.dtype else other.dtype
            raise TypeError(f"the weights are {self.panels.dtype}, and an operand is {given}; convert it first")
        x = x.contiguous()
        other = None if other is None else other.contiguous()
        out = x.new_empty(len(x), self.outputs)
        self.multiply(
            x.data_ptr(),
            ctypes.byref(self.weights),
            None,
            None,
            None if other is None else other.data_ptr(),
            out.data_ptr(),
            len(x),
            self.THEN.index(then),
            torch.get_num_threads(),
        )
        return out


def unit(dtype: torch.dtype) -> int | None:
    """The unit of the processor by which `products.cpp` is faster in `dtype` than oneDNN and MKL: `VECTORS`, `PAIRS` or `TILES`;
    None for none."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in ("AVX2", "AVX512") or dtype not in TYPES:
        return None
    if capability == "AVX2" or dtype == torch.float32:
        return VECTORS
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    tiles = limit in ("ALL", "DEFAULT") or "AMX" in limit
    if tiles and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx():
        return TILES
    return PAIRS if torch.cpu._is_avx512_bf16_supported() else None


@functools.lru_cache
def product_library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled `products.cpp` for `dtype`; None where it is not the fastest, or cannot be compiled."""
    if (by := unit(dtype)) is None:
        return None
    library = compiled("products", SOURCE, [f"-DTYPE_BF16={TYPES[dtype]}", f"-DUNIT={by}"])
    return None if library is None else ctypes.CDLL(str(library))


def packed_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product | None:
    """The fastest product with packed weights [out, in] on this processor; None if there is none."""
    library = product_library(weight.dtype)
    if library is not None and weight.shape[1] % library.depth() == 0:
        return CompiledProduct(library, weight, bias)
    return OneDnnProduct(weight, bias) if onednn_multiplies(weight.dtype) else None


# -- linear modules ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Adapter:
    """A low-rank adapter that adds to the outputs `columns`."""

    columns: slice
    down: torch.Tensor
    up: torch.Tensor
    scale: float


def side_by_side(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """All `parameters` [n, ...] as one tensor, of which they become views, so that what is written to them is written to it."""
    sizes, first = [len(each) for each in parameters], parameters[0].detach()
    storage, place = first.untyped_storage(), first.storage_offset()
    for each in parameters:
        if (
            each.untyped_storage()._cdata != storage._cdata
            or each.storage_offset() != place
            or not each.is_contiguous()
        ):
            whole = torch.cat([parameter.detach() for parameter in parameters])
            for parameter, part in zip(parameters, whole.split(sizes), strict=True):
                parameter.data = part
            return whole
        place += each.numel()
    return first.as_strided((sum(sizes), *first.shape[1:]), first.stride(), first.storage_offset())


class SamplingLinear:
    """The given linear modules (of torch, or with peft's adapters) side by side as one product, without gradients. On a
    CPU, weights are packed if `packed_product` supports their dtype; elsewhere the modules' weights become views of one tensor.
    Adapters stay separate, because merging a small one into bfloat16 weights would round it away."""

    def __init__(self, *modules: Any) -> None:
        bases = [getattr(module, "base_layer", module) for module in modules]
        self._adapters: list[_Adapter] = []
        start = 0
        for module, base in zip(modules, bases, strict=True):
            columns = slice(start, start + base.out_features)
            start = columns.stop
            for name in getattr(module, "active_adapters", ()) if hasattr(module, "lora_A") else ():
                if name in module.lora_A:
                    down, up = module.lora_A[name].weight.detach(), module.lora_B[name].weight.detach()
                    self._adapters.append(_Adapter(columns, down, up, float(module.scaling[name])))
        weights = [base.weight.detach() for base in bases]
        biases = [None if base.bias is None else base.bias.detach() for base in bases]
        self._packed: Product | None = None
        if weights[0].is_cpu:
            bias = None
            if any(one is not None for one in biases):
                bias = torch.cat(
                    [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
                )
            self._packed = packed_product(torch.cat(weights) if len(weights) > 1 else weights[0], bias)
        alike = len({weight.dtype for weight in weights}) == 1 == len({one is None for one in biases})
        if len(bases) > 1 and alike and not (weights[0].is_cpu or current_world().sharded):
            # One product instead of several and a copy. Gathered shards stay where they are.
            weights = [side_by_side([base.weight for base in bases])]
            biases = [None if biases[0] is None else side_by_side([base.bias for base in bases])]
        self._parts = list(zip(weights, biases, strict=True)) if self._packed is None else []

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The modules' weights and biases; none if they are packed."""
        return [tensor for part in self._parts for tensor in part if tensor is not None]

    @property
    def compiled(self) -> CompiledProduct | None:
        """The compiled product, if that is all that this module computes."""
        return self._packed if isinstance(self._packed, CompiledProduct) and not self._adapters else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product [T, out] for `x` [T, in]."""
        if self._packed is not None:
            out = self._packed(x, "none", None)
        else:
            parts = [linear(x, weight, bias) for weight, bias in self._parts]
            out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        for adapter in self._adapters:
            out[:, adapter.columns] += linear(linear(x, adapter.down), adapter.up) * adapter.scale
        return out

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """SiLU of the product: [T, out]."""
        return self._packed(x, "silu", None) if self._packed and not self._adapters else silu(self(x))

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """The product times `factor`: [T, out]."""
        return self._packed(x, "times", factor) if self._packed and not self._adapters else self(x) * factor

    def plus(self, x: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        """The product plus `summand`: [T, out]."""
        return self._packed(x, "plus", summand) if self._packed and not self._adapters else self(x) + summand


# -- all layers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompiledLayer:
    """The weights and settings of one layer: attention and a gated MLP, each with a norm before it."""

    index: int
    before: torch.Tensor
    """Weights [hidden] of the norm before attention."""
    between: torch.Tensor
    """Weights [hidden] of the norm before the MLP."""
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    """Weights [D] of the norms of queries and keys."""
    products: Sequence[CompiledProduct]
    """Of attention: queries, keys and values, then outputs. Of the MLP: gate, up, down."""
    scaling: float
    window: int | None


class CompiledLayers:
    """Runs `layers`, which have H_kv = `kv_heads` key heads of size `head`, in one call of the compiled kernel. A
    product of a few tokens takes a tenth of a millisecond. Python needs half as long between two products, and in the
    meantime the threads that wait for the next one fall asleep."""

    def __init__(
        self, layers: Sequence[CompiledLayer], kernel: DecodingKernel, kv_heads: int, head: int, epsilon: float
    ) -> None:
        self._layers = layers
        self._kernel, self._kv_heads, self._head, self._epsilon = kernel, kv_heads, head, epsilon
        self._run = kernel.library.run
        integers = [_SIZE] * 3
        self._run.argtypes = [_POINTER, _SIZE, *[_POINTER] * 9, *integers, ctypes.c_float, ctypes.c_int]
        self._run.restype = None
        self._multiply = ctypes.cast(layers[0].products[0].multiply, _POINTER)
        # What does not change between passes; `__call__` sets the rest.
        self._arguments = (_Layer * len(layers))()
        for arguments, layer in zip(self._arguments, layers, strict=True):
            arguments.before, arguments.between = layer.before.data_ptr(), layer.between.data_ptr()
            if layer.head_norms is not None:
                arguments.query_norm, arguments.key_norm = (weight.data_ptr() for weight in layer.head_norms)
            for name, p in zip(_PRODUCTS, layer.products, strict=True):
                setattr(arguments, name, p.weights)
            arguments.scaling = layer.scaling

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: CachedLayout) -> torch.Tensor:
        """Hidden states [T, hidden] after all layers, written to `x` [T, hidden]; `cos` and `sin` are [T, D]."""
        tokens = len(x)
        like = x.new_empty(0, self._kv_heads, self._head)
        for layer, arguments in zip(self._layers, self._arguments, strict=True):
            keys, values = layout.cache.layer(layer.index, like)
            arguments.keys, arguments.values = keys.data_ptr(), values.data_ptr()
            arguments.rows = layout.kernel_rows(self._kernel, layer.window).data_ptr()
        project, combine, _, up, _ = self._layers[0].products
        widths = (project.inputs, project.outputs, combine.inputs, up.outputs)
        scratch = [x.new_empty(tokens, width) for width in widths]
        self._run(
            self._arguments,
            len(self._layers),
            self._multiply,
            *(tensor.data_ptr() for tensor in (x, cos, sin, layout.first_rows(self._kv_heads), *scratch)),
            tokens,
            self._kv_heads,
            layout.cache.slots,
            self._epsilon,
            torch.get_num_threads(),
        )
        return x


_PRODUCTS = ("project", "combine", "gate", "up", "down")


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("before", "between", "query_norm", "key_norm")),
        *((name, _Product) for name in _PRODUCTS),
        *((name, _POINTER) for name in ("keys", "values", "rows")),
        ("scaling", ctypes.c_float),
    ]
