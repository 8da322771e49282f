"""`model.fused`: every choice gives the model of transformers, in values and gradients."""

import copy
import inspect
import sys

import pytest
import torch

from posttrain.errors import InputError
from posttrain.models import layers
from posttrain.models.layers import resolve_fused, use_fused_layers
from posttrain.models.policy import Policy
from posttrain.recipe.model import ModelRecipe
from tests.conftest import tiny_config
from tests.models import fake_liger
from tests.models.test_layers_cpu import both, outputs


def assert_equal(plain, fused):
    torch.testing.assert_close(outputs(fused), outputs(plain), atol=1e-5, rtol=1e-5)
    for (name, mine), (_, theirs) in zip(fused.named_parameters(), plain.named_parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-4, msg=name)


def model_with(fused, architecture):
    plain, _ = both(tiny_config(architecture, 100))
    made = copy.deepcopy(plain)
    use_fused_layers(made, fused)
    return plain, made


@pytest.fixture
def liger(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", fake_liger.ops())
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", fake_liger.ops())
    layers.liger.cache_clear()
    yield
    layers.liger.cache_clear()


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_ligers_functions_get_their_arguments(architecture, liger):
    plain, fused = model_with("liger", architecture)
    assert {module.functions for module in fused.modules() if hasattr(module, "functions")} == {layers.liger()}
    assert_equal(plain, fused)


def test_ligers_functions_have_the_arguments_of_the_tests():
    ops = pytest.importorskip(
        "liger_kernel.ops", reason="needs liger-kernel, which needs Triton: pip install liger-kernel"
    )
    for name in ("LigerRMSNormFunction", "LigerSiLUMulFunction", "LigerRopeFunction"):
        real = list(inspect.signature(getattr(ops, name).forward).parameters)[1:]  # without the context
        assert list(inspect.signature(getattr(fake_liger, name).apply).parameters) == real


@pytest.mark.slow
def test_compiled_functions_equal_the_model():
    assert_equal(*model_with("compiled", "qwen3"))


def test_formulas_that_are_compiled_equal_the_model(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    layers.compiled.cache_clear()
    try:
        assert_equal(*model_with("compiled", "qwen3"))
    finally:
        layers.compiled.cache_clear()


def test_none_keeps_the_operations_of_transformers(tiny_model):
    policy = Policy(ModelRecipe(path=str(tiny_model), fused="none"))
    assert not any(hasattr(module, "functions") for module in policy.model.modules())


def test_what_auto_selects(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    installed = {"liger_kernel": None}
    monkeypatch.setattr(layers, "find_spec", installed.get)
    assert (resolve_fused("auto", cpu), resolve_fused("auto", gpu)) == ("own", "own")
    installed["liger_kernel"] = True
    assert (resolve_fused("auto", cpu), resolve_fused("auto", gpu)) == ("own", "liger")
    with pytest.raises(InputError, match=r"model\.fused: Liger's kernels need a GPU; use auto"):
        resolve_fused("liger", cpu)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    layers.liger.cache_clear()
    with pytest.raises(InputError, match=r"model\.fused liger needs the package liger-kernel.*pip install"):
        use_fused_layers(both(tiny_config("llama", 100))[0], "liger")
