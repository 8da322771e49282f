"""The Bradley-Terry loss by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.losses.reward import bradley_terry
from posttrain.recipe.loss import RewardLossRecipe


def numbers(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def minus_log_sigmoid(x):
    return math.log1p(math.exp(-x))


def test_values_by_hand():
    chosen, rejected = numbers([2.0, -1.0]), numbers([0.5, 1.0])
    plain = [minus_log_sigmoid(1.5), minus_log_sigmoid(-2.0)]
    assert bradley_terry(chosen, rejected, None, 0.0).tolist() == pytest.approx(plain)
    with_margin = [minus_log_sigmoid(0.5), minus_log_sigmoid(-2.0)]
    assert bradley_terry(chosen, rejected, numbers([1.0, 0.0]), 0.0).tolist() == pytest.approx(with_margin)
    centred = [plain[0] + 0.1 * 2.5**2, plain[1]]
    assert bradley_terry(chosen, rejected, None, 0.1).tolist() == pytest.approx(centred)


scores = st.lists(st.floats(-8, 8), min_size=3, max_size=3)


@settings(deadline=None, max_examples=50)
@given(scores, scores, st.lists(st.floats(0, 3), min_size=3, max_size=3), st.floats(-5, 5))
def test_gradients_and_symmetries(chosen, rejected, margin, shift):
    c, r, m = numbers(chosen).requires_grad_(), numbers(rejected).requires_grad_(), numbers(margin)
    assert torch.autograd.gradcheck(lambda c, r: bradley_terry(c, r, m, 0.01), (c, r))
    # P(c over r) + P(r over c) = 1.
    both = (-bradley_terry(c, r, None, 0.0)).exp() + (-bradley_terry(r, c, None, 0.0)).exp()
    assert torch.allclose(both, torch.ones(3, dtype=torch.float64))
    # A constant added to all scores changes nothing, but for the centring.
    moved = bradley_terry(c + shift, r + shift, m, 0.0)
    assert torch.allclose(moved, bradley_terry(c, r, m, 0.0), atol=1e-12)
    # Centring alone is what is left of the difference.
    assert torch.allclose(bradley_terry(c, r, m, 0.3) - bradley_terry(c, r, m, 0.0), 0.3 * (c + r) ** 2)


def test_equal_scores_give_one_half():
    assert bradley_terry(numbers([3.0]), numbers([3.0]), None, 0.0).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("margin", [None, 5.0])
def test_extremes_stay_finite_in_float32(margin):
    chosen = torch.tensor([1e4, -1e4, 1e4, -1e4], requires_grad=True)
    rejected = torch.tensor([-1e4, 1e4, 1e4, -1e4], requires_grad=True)
    losses = bradley_terry(chosen, rejected, None if margin is None else torch.full((4,), margin), 0.01)
    losses.sum().backward()
    for values in (losses, chosen.grad, rejected.grad):
        assert torch.isfinite(values).all()
        assert values.dtype == torch.float32
    # A pair that is far on the wrong side still pulls with its whole weight.
    assert (chosen.grad[1], rejected.grad[1]) == (-1.0, 1.0)


def test_defaults_of_the_recipe():
    assert RewardLossRecipe().model_dump() == {
        "type": "bradley_terry",
        "margin": True,
        "center_rewards_coefficient": 0.0,
    }
