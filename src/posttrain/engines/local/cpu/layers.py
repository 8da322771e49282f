"""All layers of a decoder in one call of the compiled kernel.

A product of a few tokens takes a tenth of a millisecond. Python needs half as long between two products, and in the
meantime the threads that wait for the next one fall asleep.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from posttrain.engines.local.cache import CachedLayout
from posttrain.engines.local.cpu.kernel import DecodingKernel, named
from posttrain.engines.local.cpu.linear import CompiledProduct

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


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
    """Runs `layers`, which have H_kv = `kv_heads` key heads of size `head`."""

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
        self._arguments = (_Layer * len(layers))(*map(_arguments, layers))

    @named("layers")
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


class _Product(ctypes.Structure):
    _fields_ = [("panels", _POINTER), ("bias", _POINTER), ("inputs", _SIZE), ("outputs", _SIZE)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("before", "between", "query_norm", "key_norm")),
        *((name, _Product) for name in ("project", "combine", "gate", "up", "down")),
        *((name, _POINTER) for name in ("keys", "values", "rows")),
        ("scaling", ctypes.c_float),
    ]


def _arguments(layer: CompiledLayer) -> _Layer:
    """The layer as the kernel reads it, without what changes between passes."""
    norms = layer.head_norms and [weight.data_ptr() for weight in layer.head_norms]
    products = [
        _Product(p.panels.data_ptr(), None if p.bias is None else p.bias.data_ptr(), p.inputs, p.outputs)
        for p in layer.products
    ]
    weights = (layer.before.data_ptr(), layer.between.data_ptr(), *(norms or (None, None)))
    return _Layer(*weights, *products, scaling=layer.scaling)
