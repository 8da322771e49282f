"""Triton kernels for the logits of a chunk: what a softmax needs of them in one reading, and their gradient in place.

With the products, a forward and a backward pass move 14 bytes per bfloat16 logit. Separate operations on float32 copies
move about 76.
"""

import torch
import triton
import triton.language as tl

COLUMNS = 4096
"""Logits of a row that a program reads at a time."""


@triton.jit
def _read_rows(logits, targets, divisor, normalizers, logprobs, entropies, vocabulary, stride, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, COLUMNS)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    for start in range(0, vocabulary, COLUMNS):
        columns = start + offsets
        scores = tl.load(logits + row * stride + columns, columns < vocabulary, float("-inf")).to(tl.float32) / divisor
        higher = tl.maximum(largest, tl.max(scores))
        exponentials = tl.exp(scores - higher)
        shrunk = tl.exp(largest - higher)
        total = total * shrunk + tl.sum(exponentials)
        weighted = weighted * shrunk + tl.sum(tl.where(exponentials > 0, exponentials * scores, 0.0))
        largest = higher
    normalizer = largest + tl.log(total)
    chosen = tl.load(logits + row * stride + tl.load(targets + row)).to(tl.float32) / divisor
    tl.store(normalizers + row, normalizer)
    tl.store(logprobs + row, chosen - normalizer)
    tl.store(entropies + row, normalizer - weighted / total)


@triton.jit
def _differentiate(  # type: ignore[no-untyped-def]
    logits, targets, divisor, normalizers, factor, slope, at_target, first, columns_here, stride, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < columns_here
    places = logits + row * stride + columns
    logs = tl.load(places, inside, 0.0).to(tl.float32) / divisor - tl.load(normalizers + row)
    probability = tl.exp(logs)
    gradient = tl.where(probability > 0, probability * (logs * tl.load(slope + row) + tl.load(factor + row)), 0.0)
    gradient = tl.where(columns + first == tl.load(targets + row), tl.load(at_target + row), gradient)
    tl.store(places, gradient.to(logits.dtype.element_ty), inside)


def read_rows(
    logits: torch.Tensor, targets: torch.Tensor, divisor: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log of the sum of exponentials, log-probability of the target and entropy of each row of logits / divisor, [n]
    float32. `logits` [n, vocabulary] with adjacent columns; `targets` [n] int64."""
    found = [torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(3)]
    _read_rows[len(logits),](logits, targets, divisor, *found, logits.shape[1], logits.stride(0), COLUMNS, num_warps=8)
    return found[0], found[1], found[2]


def differentiate(
    logits: torch.Tensor,
    targets: torch.Tensor,
    divisor: float,
    normalizers: torch.Tensor,
    factor: torch.Tensor,
    slope: torch.Tensor,
    at_target: torch.Tensor,
    first: int,
) -> None:
    """Replace logits, the columns of a vocabulary from `first` on, by p (slope log p + factor), and by `at_target` at
    the target. p = exp(logits / divisor - normalizer). `logits` [n, columns] with adjacent columns; the others [n],
    float32."""
    grid = len(logits), triton.cdiv(logits.shape[1], COLUMNS)
    numbers = (divisor, normalizers, factor, slope, at_target, first, logits.shape[1], logits.stride(0))
    _differentiate[grid](logits, targets, *numbers, COLUMNS, num_warps=8)
