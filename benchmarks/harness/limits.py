"""What this machine can do at most: matrix products and reading of memory, measured.

A sampling job cannot be faster than these allow, which is `of the bound` in the table of `generation.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness.flops import Tokens, forward_flops, read_weights, rows_of
from harness.models import emulates_bfloat16
from harness.timing import seconds_of
from posttrain.recipe.plan import ModelSizes


@dataclass(frozen=True)
class Limits:
    """What the machine does at most with the threads it was measured with."""

    products: float
    """FLOP/s of the fastest product in one precision."""
    reading: float
    """Bytes/s read from memory; on a GPU, read and written by a copy."""


def product_speed(rows: int, inner: int, columns: int, dtype: torch.dtype, repeats: int = 7) -> float:
    """FLOP/s (2 per multiplication and addition) of [rows, inner] times the transpose of [columns, inner]."""
    left, weights = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
    # Small products are timed many at a time.
    count = max(1, round(2e8 / (2 * rows * inner * columns)))
    spent = seconds_of(lambda: [torch.nn.functional.linear(left, weights) for _ in range(count)], repeats, 2)
    return 2 * rows * inner * columns * count / min(spent)


def reading_speed(size: int = 1 << 29) -> float:
    """Bytes/s at which a buffer of `size` bytes, larger than the caches, is read: the better of a sum and a dot
    product."""
    buffer = torch.ones(size // 4)
    spent = seconds_of(buffer.sum, 5) + seconds_of(lambda: torch.dot(buffer, buffer), 5)
    return size / min(spent)


def measure_products(dtype: torch.dtype, side: int = 1024) -> float:
    """FLOP/s of the best of three products in `dtype`, none of which is a model's."""
    shapes = [(side, side, side), (side // 2, side, side), (2 * side, side, 2 * side)]
    return max(product_speed(*shape, dtype) for shape in shapes)


def measure_limits(dtypes: Sequence[str], side: int = 1024, size: int = 1 << 29) -> dict[str, Limits]:
    """The limits of the machine for weights of each of `dtypes`, so that they can be compared.

    Reading is measured once, and so are the products of all dtypes that are multiplied in the same precision: where
    bfloat16 is emulated, its weights are multiplied fastest in float32.
    """
    if not dtypes:
        return {}
    computed = {dtype: "float32" if dtype == "bfloat16" and emulates_bfloat16() else dtype for dtype in dtypes}
    products = {dtype: measure_products(getattr(torch, dtype), side) for dtype in dict.fromkeys(computed.values())}
    reading = reading_speed(size)
    return {dtype: Limits(products[computed[dtype]], reading) for dtype in dtypes}


def decoding_bound(sizes: ModelSizes, width: int, rows: int, context: float, limits: Limits) -> float:
    """Least seconds of a step that decodes one token in each of `rows` requests of `context` tokens each.

    Whichever takes longer: reading weights and cached keys and values once, at `width` bytes a number, or the products.
    """
    cached = 2 * sizes.layers * sizes.key_value_heads * sizes.head_size * context * width
    read = read_weights(sizes, width, rows) + rows * cached
    return max(read / limits.reading, forward_flops(sizes, Tokens(rows, rows * context, rows)) / limits.products)


def job_bound(
    sizes: ModelSizes, width: int, prompts: Sequence[Sequence[int]], lengths: Sequence[int], rows: int, limits: Limits
) -> float:
    """Least seconds of a job with `rows` requests in flight: every distinct prompt once, and full steps only."""
    distinct = {tuple(prompt) for prompt in prompts}
    reading = sum(forward_flops(sizes, rows_of(1, len(prompt), 1)) for prompt in distinct) / limits.products
    # A token weighs its own context: long answers have more of them.
    seen = sum(length * (len(prompt) + length / 2) for prompt, length in zip(prompts, lengths, strict=True)) / sum(
        lengths
    )
    # The first token of an answer comes with its prompt.
    steps = max((sum(lengths) - len(lengths)) / rows, 0)
    return reading + steps * decoding_bound(sizes, width, rows, seen, limits)
