"""A Triton kernel for one AdamW step of a tensor: every number is read and written once.

With bfloat16 weights and 8-bit moments it moves 16 bytes per weight: gradient, weight, the low bits of its master, and the
moments. Weights in float32, or moments in float32, are the same kernel with other loads.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

ROWS = 8
"""Blocks of 256 numbers of a program."""


@triton.jit
def _quantize(values, middles, smallest):
    """The scale of each row, and the nearest codes of the values after division by it: `training.adamw.tables`."""
    scales = tl.max(tl.abs(values), 1)
    shares = values / tl.where(scales > 0, scales, 1.0)[:, None]
    codes = tl.load(smallest + ((shares.to(tl.int32, bitcast=True) >> 16) & 0xFFFF)).to(tl.int32)
    return scales, (codes + (shares >= tl.load(middles + codes + 1)).to(tl.int32)).to(tl.uint8)


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    weights,
    low,
    gradients,
    first,
    second,
    first_scales,
    second_scales,
    codes,
    middles,
    smallest,
    count,
    clip,
    shrink,
    rate,
    beta1,
    beta2,
    rest1,
    rest2,
    correction,
    epsilon,
    SPLIT: tl.constexpr,
    EIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = places < count
    some = rows * BLOCK < count
    gradient = tl.load(gradients + places, inside, 0.0) / clip
    m, v = tl.load(first + places, inside, 0), tl.load(second + places, inside, 0)
    if EIGHT:
        m = tl.load(codes + m.to(tl.int32)) * tl.load(first_scales + rows, some, 0.0)[:, None]
        v = tl.load(codes + BLOCK + v.to(tl.int32)) * tl.load(second_scales + rows, some, 0.0)[:, None]
    m = beta1 * m + rest1 * gradient
    v = beta2 * v + rest2 * gradient * gradient
    m, v = tl.where(inside, m, 0.0), tl.where(inside, v, 0.0)
    value = tl.load(weights + places, inside, 0.0)
    if SPLIT:
        bits = value.to(tl.int16, bitcast=True).to(tl.int32) << 16
        value = (bits + tl.load(low + places, inside, 0).to(tl.int32)).to(tl.float32, bitcast=True)
    value = value - shrink * value - rate * m / (tl.sqrt(v) / correction + epsilon)
    if SPLIT:
        bits = value.to(tl.int32, bitcast=True)
        rest = bits.to(tl.int16)
        tl.store(low + places, rest, inside)
        value = ((bits - rest.to(tl.int32)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    tl.store(weights + places, value, inside)
    if EIGHT:
        scales, m = _quantize(m, middles, smallest)
        tl.store(first_scales + rows, scales, some)
        scales, v = _quantize(v, middles + 257, smallest + 65536)
        tl.store(second_scales + rows, scales, some)
    tl.store(first + places, m, inside)
    tl.store(second + places, v, inside)


def step(
    weight: torch.Tensor,
    low: torch.Tensor | None,
    gradient: torch.Tensor,
    moments: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    tables: Sequence[torch.Tensor],
    numbers: Sequence[float],
) -> None:
    """Update contiguous tensors with equal numbers of elements in place, as `training.adamw.update_tensor` does.

    `low` int16: the master is put together from `weight` bfloat16 and it; None: `weight` is float32. `moments` float32, or
    uint8 with `scales` of blocks and the `tables` of `training.adamw`. `numbers`: the divisor of gradients, the share by which
    weights shrink, the rate, both betas, what they lack of 1 (a GPU gets float32, of which too few digits would be left), the
    divisor of the root of the second moment, and epsilon.
    """
    tensors = (
        weight,
        weight if low is None else low,
        gradient,
        *moments,
        *(scales or moments),
        *(tables or (*moments, weight)),
    )
    kind = {"SPLIT": low is not None, "EIGHT": bool(scales), "ROWS": ROWS, "BLOCK": 256}
    _step[(triton.cdiv(weight.numel(), ROWS * 256),)](*tensors, weight.numel(), *numbers, **kind)
