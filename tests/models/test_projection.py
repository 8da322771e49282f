"""Fused log-probabilities and entropies equal the plain ones, for any upstream gradient and any slicing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.models import forward as projection
from posttrain.models.forward import (
    ForwardPath,
    float32_product,
    logits_of,
    projected_scores,
    token_scores,
    use_float32_head,
)
from posttrain.models.gate import use_path
from tests.conftest import tiny_config

N, WIDTH, VOCABULARY = 13, 8, 600


def inputs(dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, WIDTH, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
    # Targets at the edges of slices, some of them twice, and the likeliest token of the last row.
    targets = torch.tensor([0, 255, 256, 256, 511, 512, 599, 1, 300, 0, 77, 598, 0])
    targets[-1] = (hidden[-1] @ weight.T).argmax()
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def plainly(hidden, weight, targets, divisor):
    logprobs = torch.log_softmax(hidden @ weight.T / divisor, -1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("elements", [1, 3 * VOCABULARY, 13 * 300, 10**6])
@pytest.mark.parametrize("divisor", [1.0, 0.7])
@pytest.mark.parametrize("upstream", ["logprobs", "entropies", "both"])
def test_values_and_gradients_equal_the_plain_ones(monkeypatch, elements, divisor, upstream):
    monkeypatch.setattr(projection, "ELEMENTS_IN_CACHE", 2 * VOCABULARY)
    hidden, weight, targets = inputs()
    found = projected_scores(hidden, weight, targets, divisor, elements)
    expected = plainly(hidden, weight, targets, divisor)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=0)
    factors = torch.randn(2, N, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def total(scores):
        parts = {"logprobs": [0], "entropies": [1], "both": [0, 1]}[upstream]
        return sum((factors[i] * scores[i]).sum() for i in parts)

    mine, theirs = (torch.autograd.grad(total(scores), (hidden, weight)) for scores in (found, expected))
    for one, other in zip(mine, theirs, strict=True):
        assert other.abs().max() > 1e-3
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


@pytest.mark.parametrize("cases", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_triton_kernels_equal_the_operations(cases):
    pytest.importorskip("triton", reason="needs Triton: pip install triton")
    # Triton reads the variable when it is imported, and leaves messages on standard error when its process ends.
    checks = str(Path(__file__).parent / "triton_checks.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", cases, checks]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def test_only_requested_tensors_get_a_gradient():
    hidden, weight, targets = inputs()
    projected_scores(hidden, weight.detach(), targets, 1.0, 1000)[0].sum().backward()
    expected = torch.autograd.grad(plainly(hidden, weight, targets, 1.0)[0].sum(), (hidden, weight))
    torch.testing.assert_close(hidden.grad, expected[0])
    projected_scores(hidden.detach(), weight, targets, 1.0, 1000)[0].sum().backward()
    torch.testing.assert_close(weight.grad, expected[1])


@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_bfloat16_keeps_logprobs_of_its_logits_exact_and_gradients_near(scale):
    hidden, weight, targets = inputs(torch.bfloat16, scale)
    logprobs, entropies = projected_scores(hidden, weight, targets, 1.0, 5 * VOCABULARY)
    assert logprobs.dtype == entropies.dtype == torch.float32
    rounded = torch.log_softmax((hidden @ weight.T).float(), -1)
    torch.testing.assert_close(logprobs, rounded.gather(1, targets[:, None])[:, 0], atol=2e-5, rtol=0)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    factors = torch.randn(2, N, generator=torch.Generator().manual_seed(2))
    mine = torch.autograd.grad((factors[0] * logprobs + factors[1] * entropies).sum(), (hidden, weight))
    truth = plainly(*exact, targets, 1.0)
    theirs = torch.autograd.grad((factors[0] * truth[0] + factors[1] * truth[1]).sum(), exact)
    for one, other in zip(mine, theirs, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


@pytest.mark.parametrize("wide", [False, True], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("with_entropies", [False, True])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_bfloat16_gradients_are_as_exact_as_those_of_autograd(temperature, with_entropies, wide):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(100, 64, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(1024, 64, generator=generator) / 2).bfloat16().requires_grad_()
    targets = torch.randint(0, 1024, (100,), generator=generator)
    factors = torch.randn(2, 100, generator=generator)

    def gradients(scores, *leaves):
        total = (factors[0] * scores[0]).sum() + (factors[1] * scores[1]).sum() * with_entropies
        return torch.autograd.grad(total, leaves)

    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    truth = gradients(plainly(*exact, targets, temperature), *exact)
    logits = (hidden @ weight.T).float() / temperature
    logprobs = torch.log_softmax(logits, -1)
    plain = logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)
    errors = []
    for scores in (plain, projected_scores(hidden, weight, targets, temperature, 100 * 1024, wide)):
        found = gradients(scores, hidden, weight)
        errors.append([float((f - t).norm() / t.norm()) for f, t in zip(found, truth, strict=True)])
    for plain_error, error in zip(*errors, strict=True):
        assert error <= (plain_error / 2 if wide else plain_error * 1.001)


def test_a_float32_head_does_not_round_logits():
    model = AutoModelForCausalLM.from_config(tiny_config("llama", 600), dtype=torch.bfloat16)
    hidden = (torch.randn(7, 32, generator=torch.Generator().manual_seed(3)) * 10).bfloat16()
    targets = torch.arange(7) + 590
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
        exact = torch.log_softmax(hidden.double() @ model.lm_head.weight.double().T / 0.7, -1)[range(7), targets]
    rounded = token_scores(model, hidden, targets, 0.7, positions_per_chunk=3).logprobs
    use_float32_head(model)
    scores = token_scores(model, hidden, targets, 0.7, positions_per_chunk=3).logprobs
    through_modules = torch.log_softmax(logits_of(model, hidden) / 0.7, -1)[range(7), targets]
    assert (rounded - exact).abs().max() > 1e-2
    for found in (scores, through_modules):
        torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=0)
    torch.testing.assert_close(float32_product(hidden, model.lm_head.weight), logits_of(model, hidden))
    # Where the projection has a bias, the model's own module computes it.
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(600, dtype=torch.bfloat16))
    scores = token_scores(model, hidden, targets, 0.7, positions_per_chunk=3).logprobs
    torch.testing.assert_close(scores.double(), exact, atol=1e-4, rtol=0)


def test_a_nearly_certain_token_keeps_its_small_gradient_in_bfloat16():
    """1 - p is far below the resolution of bfloat16 near 1."""
    weight = torch.tensor([[9.0, 0.0], [0.0, 0.0], [0.0, 1.0]], dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    projected_scores(hidden, weight, torch.tensor([0]), 1.0, 100)[0].sum().backward()
    expected = 1 - torch.softmax(torch.tensor([9.0, 0.0, 0.0]), 0)[0]
    torch.testing.assert_close(weight.grad[0, 0].float(), expected, atol=0, rtol=5e-3)


@pytest.mark.parametrize("change", ["none", "logit_scale", "logits_scaling", "softcap", "bias"])
def test_scaled_logits_and_other_projections_are_those_of_the_model(change):
    model = AutoModelForCausalLM.from_config(tiny_config("llama", 100), dtype=torch.float32)
    use_path(model, ForwardPath())
    hidden, targets = torch.randn(7, 32, generator=torch.Generator().manual_seed(3)) * 10, torch.arange(7)
    if change == "bias":
        model.lm_head.bias = torch.nn.Parameter(torch.randn(100, generator=torch.Generator().manual_seed(4)))
    logits = model.lm_head(hidden)
    changes = {"logit_scale": {"logit_scale": 0.25}, "logits_scaling": {"logits_scaling": 8.0}}
    model.config.update(changes.get(change, {}))
    logits = logits * {"logit_scale": 0.25, "logits_scaling": 0.125}.get(change, 1.0)
    if change == "softcap":
        model.config.final_logit_softcapping = 0.3
        logits = torch.tanh(logits / 0.3) * 0.3
    scores = token_scores(model, hidden, targets, 0.5, positions_per_chunk=3)
    expected = torch.log_softmax(logits / 0.5, -1)[range(7), targets]
    torch.testing.assert_close(scores.logprobs, expected, atol=1e-5, rtol=0)
