"""Reward-model losses by hand: Bradley-Terry, and the rewards of units with both forms of their regularizer."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.losses.reward import bradley_terry, unit_entropies, unit_entropy_penalty, unit_means, unit_stds


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
    assert bradley_terry(chosen, chosen, None, 0.0).tolist() == pytest.approx([math.log(2)] * 2)


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


def packed(answers, dtype=torch.float64):
    rewards = numbers([reward for answer in answers for reward in answer], dtype)
    owner = torch.tensor([number for number, answer in enumerate(answers) for _ in answer])
    return rewards, owner, len(answers)


def test_means_spreads_and_entropies_of_units_by_hand():
    parts = packed([[1.0, 2.0, 6.0], [-0.5], [2.0, 2.0]])
    assert unit_means(*parts).tolist() == [3.0, -0.5, 2.0]
    assert unit_stds(*parts).tolist() == pytest.approx([math.sqrt(14 / 3), 0, 0])
    parts = packed([[0.0, math.log(3)], [7.0], [1.0] * 5, [0.0, -1000.0]])
    first = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert unit_entropies(*parts).tolist() == pytest.approx([first, 0, math.log(5), 0])
    assert unit_entropy_penalty(*parts, "published").tolist() == pytest.approx([-first / 2, 0, -math.log(5) / 5, 0])
    fair = unit_entropy_penalty(*parts, "length_fair").tolist()
    assert fair == pytest.approx([1 - first / math.log(2), 0, 0, 1], abs=1e-12)
    # A small spread costs its variance.
    parts = packed([[0.1, -0.1, 0.05, -0.05, 0.0, 0.02]])
    variance = unit_stds(*parts).item() ** 2
    assert unit_entropies(*parts).item() == pytest.approx(math.log(6) - variance / 2, abs=1e-4)


answers = st.lists(st.lists(st.floats(-6, 6), min_size=1, max_size=6), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(answers, st.floats(-5, 5))
def test_entropies_their_gradient_and_the_length_fair_form(found, shift):
    rewards, owner, count = packed(found)
    rewards.requires_grad_()
    entropies = unit_entropies(rewards, owner, count)
    entropies.sum().backward()
    fair = unit_entropy_penalty(rewards.detach(), owner, count, "length_fair")
    assert ((fair >= -1e-12) & (fair <= 1 + 1e-12)).all()
    for number, answer in enumerate(found):
        p, k = torch.softmax(numbers(answer), 0), len(answer)
        entropy = -(p * p.log()).sum()
        torch.testing.assert_close(entropies[number], entropy, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(rewards.grad[owner == number], -p * (p.log() + entropy), atol=1e-10, rtol=1e-10)
        expected = float((p * (p * k).log()).sum()) / math.log(k) if k > 1 else 0.0
        assert fair[number].item() == pytest.approx(expected, abs=1e-10)
    # What all units have alike is nothing to it, so the answer's score is never moved.
    moved = unit_entropies(rewards.detach() + shift, owner, count)
    torch.testing.assert_close(moved, entropies.detach(), atol=1e-9, rtol=0)
    sums = torch.zeros(count, dtype=torch.float64).index_add(0, owner, rewards.grad)
    torch.testing.assert_close(sums, torch.zeros(count, dtype=torch.float64), atol=1e-10, rtol=0)


@pytest.mark.parametrize("units", [3, 12, 30])
def test_only_the_published_form_fades_with_the_number_of_units(units):
    even, one = packed([[0.0] * units]), packed([[100.0] + [0.0] * (units - 1)])
    for form, expected in (("published", math.log(units) / units), ("length_fair", 1)):
        distance = unit_entropy_penalty(*one, form) - unit_entropy_penalty(*even, form)
        assert distance.item() == pytest.approx(expected)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8))
def test_a_single_unit_is_the_answer_bit_for_bit(scores):
    parts = packed([[score] for score in scores], torch.float32)
    assert torch.equal(unit_means(*parts), parts[0])
    for form in ("published", "length_fair"):
        rewards = parts[0].clone().requires_grad_()
        uneven = unit_entropy_penalty(rewards, *parts[1:], form)
        uneven.sum().backward()
        assert torch.equal(uneven, torch.zeros(len(scores)))
        assert torch.equal(rewards.grad, torch.zeros(len(scores)))


@pytest.mark.parametrize("form", ["published", "length_fair"])
def test_extreme_units_stay_finite_in_float32(form):
    rewards, owner, count = packed([[1e4, -1e4, 0.0], [-1e4, -1e4], [1e30, -1e30]], torch.float32)
    rewards.requires_grad_()
    unit_entropy_penalty(rewards, owner, count, form).sum().backward()
    assert torch.isfinite(rewards.grad).all()
