"""Linear layers for sampling: the weights of one or several modules, packed once for many small products."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear, silu

from posttrain.models.cpu.backend import onednn_multiplies

ROWS = 32
"""Number of rows that the packed layout is optimized for. Results are the same for any number, nearly as fast."""


@dataclass(frozen=True)
class _Adapter:
    """A low-rank adapter that adds to the outputs `columns`."""

    columns: slice
    down: torch.Tensor
    up: torch.Tensor
    scale: float

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out[:, self.columns] += linear(linear(x, self.down), self.up) * self.scale


class SamplingLinear:
    """The given linear modules (of torch, or with peft's adapters) side by side as one product, without gradients.

    On a CPU whose matrix kernels support the weights' dtype, weights are copied into the layout of those kernels.
    Otherwise every call would repeat that copy, which makes products of decoding size about twice as slow. Adapters stay
    separate, because merging a small one into bfloat16 weights would round it away. On other devices, and in bfloat16 on
    CPUs without AVX-512, the modules' own weights are used.
    """

    def __init__(self, *modules: Any) -> None:
        bases = [getattr(module, "base_layer", module) for module in modules]
        self._adapters = list(_adapters(modules, [base.out_features for base in bases]))
        weights = [base.weight.detach() for base in bases]
        self._bias = _joined_bias(bases)
        self._packed: torch.Tensor | None = None
        self._weights: Sequence[torch.Tensor] = weights
        if weights[0].device.type == "cpu" and onednn_multiplies(weights[0].dtype):
            whole = torch.cat(weights) if len(weights) > 1 else weights[0]
            self._packed = torch.ops.mkldnn._reorder_linear_weight(whole, ROWS)
            self._weights = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product [T, out] for `x` [T, in]."""
        return self._product(x, "none")

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """SiLU of the product: [T, out]."""
        if self._packed is not None and not self._adapters:
            return self._product(x, "swish")
        return silu(self(x))

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """The product times `factor`: [T, out]."""
        if self._packed is not None and not self._adapters:
            return self._with(x, factor, "mul")
        return self(x) * factor

    def plus(self, x: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        """The product plus `summand`: [T, out]."""
        if self._packed is not None and not self._adapters:
            return self._with(x, summand, "add")
        return self(x) + summand

    def _product(self, x: torch.Tensor, then: str) -> torch.Tensor:
        if self._packed is not None:
            out = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, then, [], "")
        elif len(self._weights) == 1:
            out = linear(x, self._weights[0], self._bias)
        else:
            out = torch.cat([linear(x, weight) for weight in self._weights], dim=-1)
            if self._bias is not None:
                out += self._bias
        for adapter in self._adapters:
            adapter.add(x, out)
        return out

    def _with(self, x: torch.Tensor, other: torch.Tensor, operation: str) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, other.contiguous(), self._packed, self._bias, operation)


def _joined_bias(bases: Sequence[Any]) -> torch.Tensor | None:
    """The concatenated biases of all modules, zeros for modules without one; None if no module has a bias."""
    if all(base.bias is None for base in bases):
        return None
    parts = [base.weight.new_zeros(base.out_features) if base.bias is None else base.bias.detach() for base in bases]
    return torch.cat(parts)


def _adapters(modules: Sequence[Any], widths: Sequence[int]) -> list[_Adapter]:
    adapters = []
    start = 0
    for module, width in zip(modules, widths, strict=True):
        for name in getattr(module, "active_adapters", ()) if hasattr(module, "lora_A") else ():
            if name in module.lora_A:
                down, up = module.lora_A[name].weight.detach(), module.lora_B[name].weight.detach()
                adapters.append(_Adapter(slice(start, start + width), down, up, float(module.scaling[name])))
        start += width
    return adapters
