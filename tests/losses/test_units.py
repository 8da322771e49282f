"""Rewards of units by hand: means, entropies and their gradient, both forms of the regulariser."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.losses.reward import unit_entropies, unit_entropy_penalty, unit_means, unit_stds


def packed(answers, dtype=torch.float64):
    rewards = torch.tensor([reward for answer in answers for reward in answer], dtype=dtype)
    owner = torch.tensor([number for number, answer in enumerate(answers) for _ in answer])
    return rewards, owner, len(answers)


def test_means_and_spreads_by_hand():
    parts = packed([[1.0, 2.0, 6.0], [-0.5], [2.0, 2.0]])
    assert unit_means(*parts).tolist() == [3.0, -0.5, 2.0]
    assert unit_stds(*parts).tolist() == pytest.approx([math.sqrt(14 / 3), 0, 0])


def test_entropies_by_hand():
    parts = packed([[0.0, math.log(3)], [7.0], [1.0] * 5, [0.0, -1000.0]])
    first = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert unit_entropies(*parts).tolist() == pytest.approx([first, 0, math.log(5), 0])
    assert unit_entropy_penalty(*parts, "published").tolist() == pytest.approx([-first / 2, 0, -math.log(5) / 5, 0])
    assert unit_entropy_penalty(*parts, "length_fair").tolist() == pytest.approx(
        [1 - first / math.log(2), 0, 0, 1], abs=1e-12
    )


answers = st.lists(st.lists(st.floats(-6, 6), min_size=1, max_size=6), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(answers, st.floats(-5, 5))
def test_gradient_of_the_entropy_and_its_symmetries(found, shift):
    rewards, owner, count = packed(found)
    rewards.requires_grad_()
    entropies = unit_entropies(rewards, owner, count)
    entropies.sum().backward()
    for number, answer in enumerate(found):
        p = torch.softmax(torch.tensor(answer, dtype=torch.float64), 0)
        entropy = -(p * p.log()).sum()
        torch.testing.assert_close(entropies[number], entropy, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(rewards.grad[owner == number], -p * (p.log() + entropy), atol=1e-10, rtol=1e-10)
    # What all units have alike is nothing to it, so the answer's score is never moved.
    moved = unit_entropies(rewards.detach() + shift, owner, count)
    torch.testing.assert_close(moved, entropies.detach(), atol=1e-9, rtol=0)
    sums = torch.zeros(count, dtype=torch.float64).index_add(0, owner, rewards.grad)
    torch.testing.assert_close(sums, torch.zeros(count, dtype=torch.float64), atol=1e-10, rtol=0)


@settings(deadline=None, max_examples=60)
@given(answers)
def test_the_length_fair_form_lies_between_0_and_1_and_is_a_divergence(found):
    rewards, owner, count = packed(found)
    fair = unit_entropy_penalty(rewards, owner, count, "length_fair")
    assert ((fair >= -1e-12) & (fair <= 1 + 1e-12)).all()
    for number, answer in enumerate(found):
        p, k = torch.softmax(torch.tensor(answer, dtype=torch.float64), 0), len(answer)
        expected = float((p * (p * k).log()).sum()) / math.log(k) if k > 1 else 0.0
        assert fair[number].item() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("units", [3, 12, 30])
def test_only_the_published_form_fades_with_the_number_of_units(units):
    even, one = packed([[0.0] * units]), packed([[100.0] + [0.0] * (units - 1)])
    ranges = {
        form: (unit_entropy_penalty(*one, form) - unit_entropy_penalty(*even, form)).item()
        for form in ("published", "length_fair")
    }
    assert ranges["published"] == pytest.approx(math.log(units) / units)
    assert ranges["length_fair"] == pytest.approx(1)


def test_a_small_spread_costs_its_variance():
    rewards, owner, count = packed([[0.1, -0.1, 0.05, -0.05, 0.0, 0.02]])
    variance = unit_stds(rewards, owner, count) ** 2
    assert unit_entropies(rewards, owner, count).item() == pytest.approx(math.log(6) - variance.item() / 2, abs=1e-4)


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
def test_extremes_stay_finite_in_float32(form):
    rewards, owner, count = packed([[1e4, -1e4, 0.0], [-1e4, -1e4], [1e30, -1e30]], torch.float32)
    rewards.requires_grad_()
    unit_entropy_penalty(rewards, owner, count, form).sum().backward()
    assert torch.isfinite(rewards.grad).all()
