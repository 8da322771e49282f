"""Products with either library are the same but for rounding, and the choice is made by the processor alone."""

import copy

import pytest
import torch

from posttrain.models.cpu import backend
from posttrain.models.cpu.backend import OneDnnLinear, matmul

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"),
    reason="PyTorch without oneDNN",
)


@pytest.fixture(params=[True, False], ids=["onednn", "mkl"])
def library(request, monkeypatch):
    monkeypatch.setattr(backend, "prefers_onednn", lambda: request.param)
    return request.param


@pytest.mark.parametrize(("rows", "inner", "columns"), [(3, 5, 7), (1, 64, 32), (70, 33, 129)])
def test_matrix_products_with_any_strides(library, rows, inner, columns):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(rows, inner, generator=generator), torch.randn(inner, columns, generator=generator)
    truth = (a.double() @ b.double()).float()
    for left in (a, a.t().contiguous().t()):
        for right in (b, b.t().contiguous().t()):
            torch.testing.assert_close(matmul(left, right), truth, atol=1e-5, rtol=1e-5)
            assert torch.equal(matmul(left, right), matmul(left, right))
    out = torch.empty(rows, columns)
    assert (matmul(a, b, out) is out) == (not library)
    for other in (a.bfloat16(), a.double()):
        assert torch.equal(matmul(other, other.t()), other @ other.t())


@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_equals_the_usual_one_with_its_gradients(library, bias):
    torch.manual_seed(0)
    plain = torch.nn.Linear(6, 4, bias=bias)
    mine = copy.deepcopy(plain)
    mine.__class__ = OneDnnLinear
    inputs = [torch.randn(2, 5, 6).requires_grad_()]
    inputs.append(inputs[0].detach().clone().requires_grad_())
    for module, x in zip((plain, mine), inputs, strict=True):
        module(x).square().sum().backward()
    torch.testing.assert_close(mine(inputs[1]), plain(inputs[0]), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, atol=1e-5, rtol=1e-5)
    for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("error", [None, RuntimeError("needs avx512bw")])
def test_a_precision_counts_as_multiplied_only_where_a_product_works(error, monkeypatch):
    def pack(weight, rows):
        if error:
            raise error
        return weight

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", pack)
    assert backend.onednn_multiplies.__wrapped__(torch.float32) is (error is None)


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [("AuthenticAMD", "AVX512", True), ("AuthenticAMD", "AVX2", False), ("GenuineIntel", "AVX512", False)],
)
def test_the_processor_selects_onednn(tmp_path, monkeypatch, vendor, capability, expected):
    file = tmp_path / "cpuinfo"
    file.write_text(f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(backend, "PROCESSORS", file)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert backend.prefers_onednn.__wrapped__() is (expected and torch.backends.mkl.is_available())
