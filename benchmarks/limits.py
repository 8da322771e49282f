"""What this machine can do at most: matrix products and reading of memory, measured.

The products have the shapes of training (many rows) and of decoding (a row per request), in float32 and bfloat16.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from harness.models import MODELS, model_directory
from harness.table import show
from harness.timing import available_threads, middle, seconds_of

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
            speed = middle([product_speed(*shape, dtype, repeats=3) for _ in range(3)])
            seconds = 2 * shape[0] * shape[1] * shape[2] / speed
            row[f"{label} GFLOP/s"] = speed / 1e9
            row[f"{label} weights GB/s"] = shape[1] * shape[2] * dtype.itemsize / seconds / 1e9
        rows.append(row)
    notes = [
        f"reading memory: {reading / 1e9:.1f} GB/s; weights that stay in the caches are read faster",
        f"{chosen.model}: {forward_flops(sizes, Tokens(1, 0, 1)) / 2:,.0f} parameters multiply each token; {chosen.threads} threads",
    ]
    show("Limits of the machine", rows, notes, chosen.json)


if __name__ == "__main__":
    main()
