"""The Triton kernels in Triton's interpreter, against the same computation by operations of torch (`test_projection.py`)."""

import pytest
import torch

from posttrain.models import forward as projection
from posttrain.models.cuda import adamw as kernel
from posttrain.models.cuda import vocabulary
from posttrain.models.forward import projected_scores
from posttrain.training import adamw
from posttrain.training.optimizer import fused_adamw
from tests.models.test_projection import VOCABULARY, inputs


@pytest.fixture
def kernels(monkeypatch):
    """The kernels with several slices per row."""
    monkeypatch.setattr(vocabulary, "COLUMNS", 128)
    return vocabulary


@pytest.mark.parametrize("elements", [3 * VOCABULARY, 13 * 300, 10**6])
@pytest.mark.parametrize(("divisor", "upstream"), [(1.0, [1.0, 0.0]), (0.7, [0.0, 1.0]), (0.7, [0.5, -2.0])])
@pytest.mark.parametrize("wide", [False, True])
def test_kernels_equal_the_operations(elements, divisor, upstream, wide, kernels, monkeypatch):
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
    for count, size in enumerate((1.0, 1e-3, 30.0), 1):
        gradient = size * torch.randn(start.shape, generator=draws)
        gradient[:3] = 0
        rates = adamw.Rates(0.01 * count, (0.9, 0.95), 1e-8, 0.1, max(size, 1.0), count)
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
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert not (masters[1] == start).any()
