"""KL estimators and penalties, by hand."""

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from posttrain.episode import RewardStreams
from posttrain.losses.kl import apply_kl_penalty, estimate_kl, kl_metrics
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.loss import KlRecipe
from posttrain.recipe.warnings import recipe_warnings


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", [0.5, -2.0]), ("k2", [0.125, 2.0]), ("k3", [math.exp(-0.5) - 0.5, math.exp(2) - 3])],
)
def test_estimators(estimator, expected):
    np.testing.assert_allclose(estimate_kl(estimator, np.array([0.5, -2.0])), expected, rtol=1e-12)
    found = estimate_kl(estimator, torch.tensor([0.5, -2.0], dtype=torch.float64))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def test_k3_is_finite_and_flat_beyond_its_bound():
    d = torch.tensor([-500.0, 500.0], requires_grad=True)
    estimate_kl("k3", d).sum().backward()
    assert torch.isfinite(estimate_kl("k3", d)).all()
    assert d.grad.tolist() == [0.0, 0.0]


def test_k3_is_clipped_at_ten_nats_and_counted():
    d = torch.tensor([-2.0, -2.7, -5.0], dtype=torch.float64, requires_grad=True)
    found = estimate_kl("k3", d)
    found.sum().backward()
    assert found.tolist() == pytest.approx([math.exp(2) - 3, 10.0, 10.0])
    assert d.grad.tolist() == pytest.approx([1 - math.exp(2), 0.0, 0.0])
    for values in (d, d.detach().numpy()):
        assert kl_metrics(values)["policy/kl"] == pytest.approx((math.exp(2) + 17, 3.0))
        assert kl_metrics(values)["policy/kl_clamped"] == (2.0, 3.0)


@pytest.mark.parametrize("given", [{}, {"coefficient": 0.1}])
def test_the_default_estimator_follows_the_place(given):
    in_loss = KlRecipe(**given)
    assert in_loss.estimator_in_use == "k3"
    in_reward = KlRecipe.model_validate(in_loss.model_dump() | {"apply_to": "reward"})
    assert in_reward.estimator_in_use == "k1"
    assert KlRecipe.model_validate(in_reward.model_dump() | {"apply_to": "loss"}) == in_loss


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"apply_to": "reward", "estimator": "k3"}, r"-0.99 at KL 0.16 for k3, and \+1.00 for k1; use k1"),
        ({"apply_to": "reward", "estimator": "k2"}, "k2` in the reward is not a KL penalty"),
        ({"apply_to": "reward", "importance_weighted": True}, "`importance_weighted` has no effect"),
        ({"coefficient": 0.1, "estimator": "k1"}, "zero on average"),
        ({"importance_weighted": True, "estimator": "k2"}, "k2 does not have the gradient"),
    ],
)
def test_estimators_that_are_not_a_penalty_in_the_reward_are_refused(given, words):
    with pytest.raises(ValidationError, match=words):
        KlRecipe.model_validate(given)


def test_the_default_in_the_reward_gives_no_warning():
    found = recipe_warnings(load_recipe([], ["kl.apply_to=reward"], "rl"))
    assert [note.partition(";")[0] for note in found if note.startswith("kl.")] == [
        "kl.apply_to has no effect: kl.coefficient is 0"
    ]


def test_penalty_is_subtracted_from_copies():
    rewards = RewardStreams([[np.array([0.0, 1.0], np.float32)]])
    found = apply_kl_penalty(rewards, [[np.array([0.0, 0.5], np.float32)]], 0.1)
    np.testing.assert_allclose(found.values[0][0], [0.0, 0.95], rtol=1e-6)
    assert found.values[0][0].dtype == np.float32
    assert rewards.values[0][0][1] == 1.0
