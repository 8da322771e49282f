"""The Triton kernels in Triton's interpreter, against the same computation by operations of torch (`test_projection.py`)."""

import pytest
import torch

from posttrain.models import forward as projection
from posttrain.models.cuda import vocabulary
from posttrain.models.forward import projected_scores
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
