"""What this machine can do at most: matrix products and reading of memory, measured.

The products have the shapes of training (many rows) and of decoding (a row per request), in float32 and bfloat16: torch's,
oneDNN's with packed weights, and those of the engine, which are one of these or its own.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness.models import MODELS, model_directory
from harness.table import show
from harness.timing import available_threads, seconds_of

from posttrain.engines.local.cpu.linear import OneDnnProduct, packed_product
from posttrain.models.cpu.backend import onednn_multiplies
from posttrain.planning.memory import ModelSizes
from posttrain.planning.model_sizes import model_sizes
from posttrain.planning.work import Tokens, forward_flops, read_weights, rows_of


@dataclass(frozen=True)
class Limits:
    """What the machine does at most with the threads it was measured with."""

    products: float
    """FLOP/s of the fastest product in one precision."""
    reading: float
    """Bytes/s read from memory."""


def product_speed(rows: int, inner: int, columns: int, dtype: torch.dtype, repeats: int = 7) -> float:
    """FLOP/s (2 per multiplication and addition) of [rows, inner] times the transpose of [columns, inner]."""
    left, weights = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
    # Small products are timed many at a time.
    count = max(1, round(2e8 / (2 * rows * inner * columns)))
    spent = seconds_of(lambda: [torch.nn.functional.linear(left, weights) for _ in range(count)], repeats, 2)
    return 2 * rows * inner * columns * count / min(spent)


def layers_speed(
    rows: int, inner: int, columns: int, dtype: torch.dtype, of: Callable[[torch.Tensor], Callable[[torch.Tensor], Any]]
) -> float:
    """FLOP/s as in `product_speed` of the products that `of` makes of weights, which come from memory as in a model of
    many layers.
    """
    work, size = 2 * rows * inner * columns, inner * columns * dtype.itemsize
    layers = round(max(1, min(2**27 / size, 1e10 / work)))
    left = torch.randn(rows, inner).to(dtype)
    products = [of(torch.randn(columns, inner).to(dtype)) for _ in range(layers)]
    return work * layers / min(seconds_of(lambda: [product(left) for product in products], 5, 1))


def _linear(weights: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    return partial(torch.nn.functional.linear, weight=weights)


def _of_onednn(weights: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    return partial(OneDnnProduct(weights, None), then="none")


def _of_the_engine(weights: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    product = packed_product(weights, None)
    return _linear(weights) if product is None else lambda x: product(x, "none", None)


def reading_speed(size: int = 1 << 29) -> float:
    """Bytes/s at which a buffer of `size` bytes, larger than the caches, is read: the better of a sum and a dot
    product."""
    buffer = torch.ones(size // 4)
    spent = seconds_of(buffer.sum, 5) + seconds_of(lambda: torch.dot(buffer, buffer), 5)
    return size / min(spent)


def measure_limits(dtype: torch.dtype, side: int = 1024, size: int = 1 << 29) -> Limits:
    """The limits of the machine for weights of `dtype`: the best of three products, none of which is a model's."""
    shapes = [(side, side, side), (side // 2, side, side), (2 * side, side, 2 * side)]
    return Limits(max(product_speed(*shape, dtype) for shape in shapes), reading_speed(size))


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


def _shapes(sizes: ModelSizes, tokens: int, in_flight: Sequence[int]) -> list[tuple[str, int, int, int]]:
    """Name, rows, inner size and columns of the products of a model."""
    queries = sizes.heads * sizes.head_size
    widths = {
        "queries, keys, values": (sizes.hidden, queries + 2 * sizes.key_value_heads * sizes.head_size),
        "gate and up": (sizes.hidden, 2 * sizes.intermediate),
        "down": (sizes.intermediate, sizes.hidden),
        "vocabulary": (sizes.hidden, sizes.vocabulary),
    }
    stages = [("training", tokens), *((f"decoding {rows}", rows) for rows in in_flight)]
    return [(f"{stage}: {name}", rows, *shape) for stage, rows in stages for name, shape in widths.items()]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="whose shapes are measured")
    parser.add_argument("--in-flight", default="1,8,32,128", help="requests that are decoded together")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a training pass")
    parser.add_argument("--side", type=int, default=2048, help="of the square product that is the peak")
    parser.add_argument("--buffer", type=int, default=512, help="MiB of the buffer that is read")
    parser.add_argument("--threads", type=int, default=available_threads(), help="processor threads")
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    sizes = model_sizes(str(model_directory(chosen.model)))
    assert sizes is not None
    reading = reading_speed(chosen.buffer << 20)
    shapes = _shapes(sizes, chosen.tokens, [int(rows) for rows in chosen.in_flight.split(",")])
    rows: list[dict[str, Any]] = []
    for name, *shape in [("peak: square product", *[chosen.side] * 3), *shapes]:
        row: dict[str, Any] = {"product": name, "shape": " x ".join(map(str, shape))}
        for dtype, label in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
            for way, of in (("torch", _linear), ("oneDNN", _of_onednn), ("engine", _of_the_engine)):
                known = way != "oneDNN" or onednn_multiplies(dtype)
                row[f"{way} {label}"] = layers_speed(*shape, dtype, of) / 1e9 if known else None
        rows.append(row)
    notes = [
        f"products in GFLOP/s; reading memory: {reading / 1e9:.1f} GB/s",
        f"{chosen.model}: {forward_flops(sizes, Tokens(1, 0, 1)) / 2:,.0f} parameters multiply each token; {chosen.threads} threads",
    ]
    show("Limits of the machine", rows, notes, chosen.json)


if __name__ == "__main__":
    main()
