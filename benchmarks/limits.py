"""What this machine can do at most: matrix products and reading of memory, measured.

The products have the shapes of training (many rows) and of decoding (a row per request), in float32 and bfloat16: torch's,
oneDNN's with packed weights, and those of the engine, which are one of these or its own.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness.flops import Tokens, forward_flops, read_weights, rows_of
from harness.models import MODELS, emulates_bfloat16, model_directory
from harness.options import named_sides, number, numbers, seconds
from harness.table import show
from harness.timing import OverLimit, available_threads, seconds_of

from posttrain.engines.local.cpu.layers import OneDnnProduct, packed_product
from posttrain.models.cpu.backend import onednn_multiplies
from posttrain.planning.memory import ModelSizes
from posttrain.planning.model_sizes import model_sizes


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
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    of: Callable[[torch.Tensor], Callable[[torch.Tensor], Any]],
    memory: int,
    repeats: int,
    limit: float,
) -> float:
    """FLOP/s as in `product_speed` of the products that `of` makes of weights, which come from memory as in a model of
    many layers: `memory` bytes of them, or as many as take `PASS` FLOP. Passes over them: one that is not counted, and
    `repeats`. OverLimit if they would take more than `limit` seconds, judged by the first.
    """
    rows, inner, columns = shape
    work, size = 2 * rows * inner * columns, inner * columns * dtype.itemsize
    layers = max(1, round(min(memory / size, PASS / work)))
    left = torch.randn(rows, inner).to(dtype)
    products = [of(torch.randn(columns, inner).to(dtype)) for _ in range(layers)]

    def all_products() -> None:
        for product in products:
            product(left)

    (first,) = seconds_of(all_products, 1, 0)
    if first * (1 + repeats) > limit:
        raise OverLimit(f"{1 + repeats} passes of {first:.1f} s take more than {limit:g} s")
    return work * layers / min(seconds_of(all_products, repeats, 0))


def _linear(weights: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    return partial(torch.nn.functional.linear, weight=weights)


def _of_onednn(weights: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    return partial(OneDnnProduct(weights, None), then="none")


def _of_the_engine(weights: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    product = packed_product(weights, None)
    return _linear(weights) if product is None else lambda x: product(x, "none", None)


SIDES = {
    f"{way} {label}": (dtype, of)
    for dtype, label in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16"))
    for way, of in (("torch", _linear), ("oneDNN", _of_onednn), ("engine", _of_the_engine))
}
"""Name of a column -> the precision, and what makes a product of weights."""
PASS = 1e10
"""FLOP of a pass over the weights at most, unless a single product takes more."""


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


def _shapes(sizes: ModelSizes, tokens: int, in_flight: Sequence[int]) -> list[tuple[str, int, int, int]]:
    """Name, rows, inner size and columns of the products of a model."""
    queries = sizes.heads * sizes.head_size
    widths = {
        "queries, keys, values": (sizes.hidden, queries + 2 * sizes.key_value_heads * sizes.head_size),
        "gate and up": (sizes.hidden, 2 * sizes.intermediate),
        "down": (sizes.intermediate, sizes.hidden),
        "vocabulary": (sizes.hidden, sizes.vocabulary),
    }
    # From the least work to the most, so that a side over the limit is noticed early.
    stages = [*((f"decoding {rows}", rows) for rows in sorted(in_flight)), ("training", tokens)]
    return [(f"{stage}: {name}", rows, *shape) for stage, rows in stages for name, shape in widths.items()]


def _sides(given: str | None) -> tuple[list[str], list[str]]:
    """The sides of --sides that this processor has, and why others are left out."""
    names, notes = named_sides(given, tuple(SIDES)), []
    if given is None and (emulated := emulates_bfloat16()):
        names = [name for name in names if "bfloat16" not in name or name.startswith("engine")]
        notes.append(f"except in the engine's products, {emulated}")
    lacking = [name for name in names if SIDES[name][1] is _of_onednn and not onednn_multiplies(SIDES[name][0])]
    names = [name for name in names if name not in lacking]
    if lacking:
        notes.append(f"{' and '.join(lacking)}: oneDNN does not multiply in this precision on this processor")
    if not names:
        raise SystemExit(f"--sides: none of these sides can run here: {'; '.join(notes)}")
    return names, notes


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="whose shapes are measured")
    parser.add_argument("--in-flight", type=numbers(1), default="1,8,32,128", help="requests that are decoded together")
    parser.add_argument("--tokens", type=number(1), default=1024, help="tokens of a training pass")
    parser.add_argument("--side", type=number(1), default=2048, help="of the square product that is the peak")
    parser.add_argument(
        "--buffer", type=number(1), default=512, help="MiB of the buffer that is read; weights take a quarter of it"
    )
    parser.add_argument("--repeats", type=number(1), default=5, help="passes over the weights that are measured")
    parser.add_argument(
        "--limit", type=seconds, default=60.0, help="seconds of one measurement after which a side is left out"
    )
    parser.add_argument("--sides", help="measure those whose name holds one of these words, separated by commas")
    parser.add_argument("--threads", type=number(1), default=available_threads(), help="processor threads")
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    return parser.parse_args()


def main() -> None:
    """Measure and print the table."""
    chosen = options()
    names, notes = _sides(chosen.sides)
    torch.set_num_threads(chosen.threads)
    sizes = model_sizes(str(model_directory(chosen.model)))
    assert sizes is not None
    reading = reading_speed(chosen.buffer << 20)
    _say(f"reading memory: {reading / 1e9:.1f} GB/s")
    shapes = [*_shapes(sizes, chosen.tokens, chosen.in_flight), ("peak: square product", *[chosen.side] * 3)]
    rows: list[dict[str, Any]] = []
    over: list[str] = []
    for number_of_row, (name, *shape) in enumerate(shapes, 1):
        begun = time.perf_counter()
        row: dict[str, Any] = {"product": name, "shape": " x ".join(map(str, shape))}
        for side in names:
            row[side] = None
            if side in over:
                continue
            dtype, of = SIDES[side]
            memory = chosen.buffer << 18
            try:
                row[side] = layers_speed(tuple(shape), dtype, of, memory, chosen.repeats, chosen.limit) / 1e9
            except OverLimit as error:
                over.append(side)
                notes.append(f"{side} is left out from {name} on: {error} (--limit)")
                _say(notes[-1])
        rows.append(row)
        _say(f"{number_of_row} of {len(shapes)}: {name} took {time.perf_counter() - begun:.1f} s")
    notes += [
        f"products in GFLOP/s; reading memory: {reading / 1e9:.1f} GB/s",
        f"{chosen.model}: {forward_flops(sizes, Tokens(1, 0, 1)) / 2:,.0f} parameters multiply each token; {chosen.threads} threads",
    ]
    show("Limits of the machine", rows, notes, chosen.json)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
