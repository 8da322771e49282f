"""AdamW of single tensors: masters that are bfloat16 weights and the 16 bits after them, and moments in 8-bit numbers.

Loshchilov and Hutter 2019, "Decoupled weight decay regularization", arXiv 1711.05101. Dettmers et al. 2022, "8-bit Optimizers
via Block-wise Quantization", arXiv 2110.02861: each block of 256 numbers has a scale, and codes are dense near 0.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from posttrain.models.cuda import triton_kernels

BLOCK = 256
"""8-bit numbers with a common scale."""
LEAST = 4096
"""Numbers of a tensor, or of a shard, whose moments have 8 bits. Smaller ones have float32."""
CHUNK = 1 << 18
"""Numbers that a CPU updates at a time, so that temporary float32 copies stay in its cache."""


@dataclass(frozen=True)
class Rates:
    """Numbers of an update that several tensors share."""

    rate: float
    betas: tuple[float, float]
    epsilon: float
    decay: float
    clip: float
    """Gradients are divided by it."""
    count: float
    """Updates of the tensors, this one included."""


Fused = Callable[[Rates, list[torch.Tensor], list[torch.Tensor], list[tuple[torch.Tensor, ...]]], None]
"""AdamW of float32 weights, with their gradients and moments."""


def update_tensor(
    rates: Rates,
    weight: torch.Tensor,
    low: torch.Tensor | None,
    gradient: torch.Tensor,
    moments: Mapping[str, torch.Tensor],
    fused: Fused,
) -> None:
    """AdamW of one contiguous tensor: a float32 `weight`, or a bfloat16 one with the `low` bits of its master. `moments` are
    those of `zero_moments`. Without Triton, `fused` computes with float32 copies."""
    values = [one.view(-1) for name, one in moments.items() if not name.startswith("absmax")]
    scales = [one for name, one in moments.items() if name.startswith("absmax")]
    weight, slope = weight.view(-1), gradient.contiguous().view(-1)
    low = None if low is None else low.view(-1)
    if (kernels := adamw_kernels(weight)) is not None:
        correction, root = (1 - beta**rates.count for beta in rates.betas)
        shrink, rate = rates.rate * rates.decay, rates.rate / correction
        rests = (1 - beta for beta in rates.betas)
        numbers = rates.clip, shrink, rate, *rates.betas, *rests, root**0.5, rates.epsilon
        kernels.step(weight, low, slope, values, scales, tables(weight.device) if scales else (), numbers)
        return
    size = CHUNK if weight.device.type == "cpu" else weight.numel()
    for start in range(0, weight.numel(), size):
        part, blocks = slice(start, start + size), slice(start // BLOCK, -(-(start + size) // BLOCK))
        here, rest = weight[part], None if low is None else low[part]
        master = here if rest is None else joined(here, rest)
        wide = [one[part] for one in values]
        for kind, scale in enumerate(scales):
            wide[kind] = dequantized(wide[kind], scale[blocks], kind)
        fused(rates, [master], [slope[part]], [tuple(wide)])
        for kind, scale in enumerate(scales):
            quantize(wide[kind], values[kind][part], scale[blocks], kind)
        if rest is not None:
            split(master, here, rest)


def zero_moments(weight: torch.Tensor, eight: bool) -> dict[str, torch.Tensor]:
    """Moments before the first update of `weight`: float32, or 8-bit numbers and the scales of their blocks."""
    if not eight:
        return {name: torch.zeros_like(weight, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
    if weight.numel() < LEAST:
        return {name: torch.zeros_like(weight, dtype=torch.float32) for name in ("state1", "state2")}
    zeros = {name: torch.zeros_like(weight, dtype=torch.uint8) for name in ("state1", "state2")}
    blocks = -(-weight.numel() // BLOCK)
    scales = {f"absmax{number}": torch.zeros(blocks, device=weight.device) for number in (1, 2)}
    return zeros | scales


@cache
def tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For first and second moments the numbers of the codes, [2, 256] float32 in ascending order; the middle between each code
    and the one before it, and infinity, [2, 257] float32; and the smallest code of numbers by the upper 16 bits of a float32
    number, [2, 65536] uint8. Of such numbers, the code is that one or the next.

    The numbers are those of bitsandbytes: 0, 1, and the centres of 2**n intervals of each power of ten from 1e-7 on, with a sign
    for first moments. No second moment becomes 0 but 0 itself: the step divides by its root.
    """
    numbers, middles = torch.zeros(2, 256), torch.full((2, 257), math.inf)
    upper = torch.arange(1 << 16, dtype=torch.int32)
    least = ((upper << 16) | (0xFFFF * (upper >= 1 << 15)).int()).view(torch.float32)
    for kind, powers in enumerate((range(7), range(1, 8))):
        edges = [torch.linspace(0.1, 1, 2**power + 1) for power in powers]
        centres = torch.cat([10.0 ** (n - 6) * ((each[:-1] + each[1:]) / 2) for n, each in enumerate(edges)])
        signed = torch.cat([centres, -centres]) if kind == 0 else centres
        numbers[kind] = torch.cat([signed, torch.tensor([0.0, 1.0])]).sort().values
    middles[:, 1:256] = (numbers[:, 1:] + numbers[:, :-1]) / 2
    middles[1, 1] = torch.finfo(torch.float32).tiny
    first = torch.stack([torch.bucketize(least, row, right=True) for row in middles[:, 1:]])
    return numbers.to(device), middles.to(device), first.clamp(max=255).to(device, torch.uint8)


def dequantized(values: torch.Tensor, scales: torch.Tensor, kind: int) -> torch.Tensor:
    """The float32 numbers of codes [n] uint8. `kind`: 0 for first moments, 1 for second ones."""
    numbers = tables(values.device)[0][kind].index_select(0, values.int())
    return numbers.mul_(scales[:, None].expand(-1, BLOCK).reshape(-1)[: len(numbers)])


def quantize(numbers: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, kind: int) -> None:
    """Set codes `values` [n] uint8 and `scales` to the nearest of `numbers` [n] float32."""
    _, middles, first = (table[kind] for table in tables(values.device))
    blocks = torch.nn.functional.pad(numbers, (0, -len(numbers) % BLOCK)).view(-1, BLOCK)
    torch.amax(blocks.abs(), 1, out=scales)
    shares = (blocks / torch.where(scales > 0, scales, 1.0)[:, None]).view(-1)
    codes = first.index_select(0, (shares.view(torch.int32) >> 16).bitwise_and_(0xFFFF)).int()
    codes += shares >= middles.index_select(0, codes + 1)
    values.copy_(codes[: len(values)])


def joined(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Float32 numbers whose bits are those of `weight` bfloat16, followed by zeros, plus `low` int16."""
    master = weight.detach().float()
    master.view(torch.int32).add_(low)
    return master


def split(master: torch.Tensor, weight: torch.Tensor, low: torch.Tensor) -> None:
    """Set `weight` to the nearest bfloat16 number of float32 `master`, which is overwritten, and `low` to what its bits have
    beyond it. Halfway, it is the one away from 0, because the distance to the other one needs 17 bits."""
    bits = master.view(torch.int32)
    low.copy_(bits)
    weight.detach().copy_(bits.sub_(low).view(torch.float32))


def adamw_kernels(weight: torch.Tensor) -> Any:
    """The module of Triton kernels for `weight`; None for those of a processor, and without Triton."""
    return triton_kernels("adamw") if weight.is_cuda else None
