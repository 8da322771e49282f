"""The Triton kernels in Triton's interpreter, against the same computation by operations of torch (`test_projection.py`)."""

from itertools import product

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from posttrain.engines.local import decoder
from posttrain.engines.local.cache import Segment, positions_of
from posttrain.engines.local.cpu import layers
from posttrain.engines.local.cuda import FlashLayout, KeyValueRows
from posttrain.models import forward as projection
from posttrain.models.cuda import adamw as kernel
from posttrain.models.cuda import vocabulary
from posttrain.models.forward import projected_scores
from posttrain.training import adamw
from posttrain.training.optimizer import fused_adamw
from tests.engines.test_decoder import MODELS, made
from tests.engines.test_flash_layout import documented
from tests.models.test_projection import VOCABULARY, inputs
from tests.training import small


@pytest.fixture
def kernels(monkeypatch):
    """The kernels with several slices per row."""
    monkeypatch.setattr(vocabulary, "COLUMNS", 128)
    return vocabulary


EACH = list(
    product([3 * VOCABULARY, 13 * 300, 10**6], [(1.0, 1.0, 0.0), (0.7, 0.0, 1.0), (0.7, 0.5, -2.0)], [False, True])
)
QUICK = [one for number, one in enumerate(EACH) if number % 4 in (0, 3)]
"""Every two of a number of elements, a loss and a width of the logits."""


@pytest.mark.parametrize("case", small.cases(EACH, QUICK), ids=str)
def test_kernels_equal_the_operations(case, kernels, monkeypatch):
    elements, (divisor, *upstream), wide = case

    def results(dtype):
        hidden, weight, targets = inputs(dtype)
        scores = projected_scores(hidden, weight, targets, divisor, elements, wide and dtype != torch.float64)
        loss = sum((factor * score).sum() for factor, score in zip(upstream, scores, strict=True) if factor)
        return [*(score.detach() for score in scores), *torch.autograd.grad(loss, (hidden, weight))]

    kind = torch.bfloat16 if wide else torch.float32
    truth, plain = results(torch.float64) if not wide else results(kind), results(kind)
    monkeypatch.setattr(projection, "vocabulary_kernels", lambda logits: kernels)
    for mine, theirs, exact in zip(results(kind), plain, truth, strict=True):
        size = float(exact.abs().max())
        errors = [float((one - exact).double().square().mean().sqrt()) / size for one in (mine, theirs)]
        # Products in float32 alone are off by 3e-6 on a processor without AVX-512.
        assert errors[0] < (1e-3 if mine.dtype == torch.bfloat16 else 5e-6)
        assert wide or errors[0] < 1.5 * errors[1] + 1e-8


def test_a_kernel_gives_impossible_tokens_no_gradient(kernels):
    logits, targets, ones = torch.randn(3, 600), torch.zeros(3, dtype=torch.int64), torch.ones(3)
    logits[:, 300:] = float("-inf")
    expected = torch.log_softmax(logits, -1)
    normalizers, logprobs, entropies = kernels.read_rows(logits, targets, 1.0)
    torch.testing.assert_close(logprobs, expected[:, 0])
    torch.testing.assert_close(entropies, -(expected.exp() * expected).nan_to_num(0.0).sum(-1))
    kernels.differentiate(logits, targets, 1.0, normalizers, ones, ones, ones, 0)
    assert logits.isfinite().all()
    assert not logits[:, 300:].any()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in MODELS), ("mistral", torch.bfloat16), ("qwen3", torch.bfloat16)],
)
def test_fused_layers_equal_separate_operations(name, dtype, monkeypatch):
    """Prompts and decoding over the cache of a GPU, with biases, windows, head norms, heads of 32, 64 and 80, and 2 or 7 per key."""
    convert = interpreter._convert_float

    def rounding(numbers, source, target, mode):
        """The interpreter truncates where a GPU rounds."""
        if target != tl.bfloat16 or source != tl.float32:
            return convert(numbers, source, target, mode)
        wide = torch.from_numpy(np.frombuffer(numbers.tobytes(), np.float32).copy())
        return wide.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(numbers.shape)

    monkeypatch.setattr(interpreter, "_convert_float", rounding)
    odd = {"head_dim": 80, "num_attention_heads": 7, "num_key_value_heads": 1, "intermediate_size": 1025}
    model = made(name, dtype, num_hidden_layers=2, **(odd if name == "mistral" else {}))

    def passes(decoding):
        cache, ids, outputs = KeyValueRows(3), torch.arange(3, 40), []
        for spans in (((0, 0, 10), (2, 0, 4)), ((0, 10, 1), (1, 0, 3), (2, 4, 1)), ((0, 11, 1), (1, 3, 1), (2, 5, 1))):
            layout = FlashLayout(cache, [Segment(*span) for span in spans], torch.device("cpu"))
            positions = torch.from_numpy(positions_of(layout.segments))
            outputs.append(decoding.hidden(ids[: len(positions)], positions, layout).float())
        return torch.cat(outputs)

    with torch.library._scoped_library("aten", "IMPL") as library, torch.no_grad():
        library.impl("_flash_attention_forward", documented, "CPU")
        # As on a GPU.
        monkeypatch.setattr(decoder, "decoding_kernel", lambda *shape: None)
        monkeypatch.setattr(layers, "packed_product", lambda *weights: None)
        separate, fused = (passes(decoder.decoder_of(model, fused=fused)) for fused in (False, True))
        if dtype == torch.float32:
            torch.testing.assert_close(fused, separate, atol=2e-5, rtol=0)
        exact = passes(decoder.decoder_of(model.float()))
    errors = [float((found - exact).square().mean().sqrt()) for found in (separate, fused)]
    assert errors[1] <= 1.05 * errors[0] + 1e-5, errors


@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_adamw_equals_the_operations(dtype, eight, monkeypatch):
    """Of the last program, most numbers are outside."""
    draws = torch.Generator().manual_seed(0)
    start = torch.randn(50, 97, generator=draws)
    sides = []
    for module in (None, kernel):
        weight = torch.zeros(start.shape, dtype=dtype)
        low = torch.zeros(start.shape, dtype=torch.int16) if dtype == torch.bfloat16 else None
        weight.copy_(start) if low is None else adamw.split(start.clone(), weight, low)
        sides.append((module, weight, low, adamw.zero_moments(weight, eight)))
    launch = kernel.step
    # A GPU gets numbers in float32.
    monkeypatch.setattr(kernel, "step", lambda *given: launch(*given[:-1], [float(np.float32(n)) for n in given[-1]]))
    for count, size in enumerate((1.0, 1e-3, 30.0), 1):
        gradient = size * torch.randn(start.shape, generator=draws)
        gradient[:3] = 0
        rates = adamw.Rates(0.01 * count, (0.9, 0.999), 1e-8, 0.1, max(size, 1.0), count)
        for module, weight, low, moments in sides:
            monkeypatch.setattr(adamw, "adamw_kernels", lambda weight, module=module: module)
            adamw.update_tensor(rates, weight, low, gradient.clone(), moments, fused_adamw)
    masters = [weight if low is None else adamw.joined(weight, low) for _, weight, low, _ in sides]
    # A number between two codes may be rounded to either.
    torch.testing.assert_close(*masters, rtol=0, atol=1e-3 if eight else 1e-6)
    assert ((masters[0] - masters[1]).abs() > 1e-6).float().mean() < 1e-3
    for name, expected in sides[0][3].items():
        found = sides[1][3][name]
        if expected.dtype == torch.uint8:
            apart = (found.int() - expected.int()).abs()
            assert apart.max() <= 1
            assert apart.float().mean() < 1e-3
        else:
            torch.testing.assert_close(found, expected, rtol=5e-6, atol=2e-8)
    assert not (masters[1] == start).any()
