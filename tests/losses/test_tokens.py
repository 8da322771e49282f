"""Losses and rules of single tokens by hand: KL estimators and penalties, entropy control, the value loss."""

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from posttrain.episode import RewardStreams
from posttrain.losses.entropy import clip_cov, covariances, kl_cov, top_entropy
from posttrain.losses.kl import apply_kl_penalty, estimate_kl, kl_metrics
from posttrain.losses.reward import value_loss
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.loss import ClipCovRecipe, KlCovRecipe, KlRecipe
from posttrain.recipe.warnings import recipe_warnings


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", [0.5, -2.0]), ("k2", [0.125, 2.0]), ("k3", [math.exp(-0.5) - 0.5, math.exp(2) - 3])],
)
def test_kl_estimators(estimator, expected):
    np.testing.assert_allclose(estimate_kl(estimator, np.array([0.5, -2.0])), expected, rtol=1e-12)
    found = estimate_kl(estimator, torch.tensor([0.5, -2.0], dtype=torch.float64))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def test_k3_is_clipped_at_ten_nats_and_counted_and_flat_beyond():
    d = torch.tensor([-2.0, -2.7, -5.0, -500.0], dtype=torch.float64, requires_grad=True)
    found = estimate_kl("k3", d)
    found.sum().backward()
    assert found.tolist() == pytest.approx([math.exp(2) - 3, 10.0, 10.0, 10.0])
    assert d.grad.tolist() == pytest.approx([1 - math.exp(2), 0.0, 0.0, 0.0])
    for values in (d, d.detach().numpy()):
        assert kl_metrics(values)["policy/kl"] == pytest.approx((math.exp(2) + 27, 4.0))
        assert kl_metrics(values)["policy/kl_clamped"] == (3.0, 4.0)
    far = torch.tensor([-500.0, 500.0], requires_grad=True)
    estimate_kl("k3", far).sum().backward()
    assert torch.isfinite(estimate_kl("k3", far)).all()
    assert far.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("given", [{}, {"coefficient": 0.1}])
def test_the_default_estimator_follows_the_place(given):
    in_loss = KlRecipe(**given)
    assert in_loss.estimator_in_use == "k3"
    in_reward = KlRecipe.model_validate(in_loss.model_dump() | {"apply_to": "reward"})
    assert in_reward.estimator_in_use == "k1"
    assert KlRecipe.model_validate(in_reward.model_dump() | {"apply_to": "loss"}) == in_loss
    found = recipe_warnings(load_recipe([], ["kl.apply_to=reward"], "rl"))
    unused = "kl.apply_to has no effect: kl.coefficient is 0"
    assert [note.partition(";")[0] for note in found if note.startswith("kl.")] == [unused]


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
def test_estimators_that_are_not_a_penalty_are_refused(given, words):
    with pytest.raises(ValidationError, match=words):
        KlRecipe.model_validate(given)


def test_the_penalty_is_subtracted_from_copies():
    rewards = RewardStreams([[np.array([0.0, 1.0], np.float32)]])
    found = apply_kl_penalty(rewards, [[np.array([0.0, 0.5], np.float32)]], 0.1)
    np.testing.assert_allclose(found.values[0][0], [0.0, 0.95], rtol=1e-6)
    assert found.values[0][0].dtype == np.float32
    assert rewards.values[0][0][1] == 1.0


def test_the_top_share_by_entropy():
    entropies = np.array([0.1, 2.0, 0.5, 1.0, 0.3])
    assert top_entropy(entropies, 0.4).tolist() == [False, True, False, True, False]
    assert top_entropy(entropies, 0.01).tolist() == [False, True, False, False, False]
    assert top_entropy(entropies, 1.0).all()
    assert top_entropy(np.array([1.0, 1.0, 0.0]), 0.2).tolist() == [True, True, False]
    assert len(top_entropy(np.zeros(0), 0.2)) == 0


def test_covariances_average_to_the_covariance():
    logprobs, advantages = np.array([-1.0, -2.0, -3.0, 0.0]), np.array([1.0, -1.0, 0.0, 2.0])
    found = covariances(logprobs, advantages)
    np.testing.assert_allclose(found, [0.5 * 0.5, -0.5 * -1.5, -1.5 * -0.5, 1.5 * 1.5])
    assert found.mean() == pytest.approx(np.cov(logprobs, advantages, bias=True)[0, 1])


def test_clip_cov_draws_among_the_tokens_between_its_bounds_and_kl_cov_takes_the_largest():
    values = np.array([0.5, 2.0, 3.0, 9.0, 4.0, 1.5, 0.0, 0.0, 0.0, 0.0])
    clip = ClipCovRecipe(share=0.2, low=1.0, high=5.0)
    drawn = [clip_cov(clip, values, np.random.default_rng(seed)) for seed in range(40)]
    assert all(chosen.sum() == 2 for chosen in drawn)
    assert np.flatnonzero(np.any(drawn, axis=0)).tolist() == [1, 2, 4, 5]
    few = ClipCovRecipe(share=0.9, low=1.0, high=5.0)
    assert np.flatnonzero(clip_cov(few, values, np.random.default_rng(0))).tolist() == [1, 2, 4, 5]
    assert not clip_cov(clip, np.zeros(5), np.random.default_rng(0)).any()
    assert np.flatnonzero(kl_cov(KlCovRecipe(share=0.5), np.array([1.0, 3.0, 3.0, -5.0]))).tolist() == [1, 2]
    assert np.flatnonzero(kl_cov(KlCovRecipe(), np.array([1.0, 3.0, 3.0]))).tolist() == [1]


def test_the_value_loss_is_half_the_larger_square():
    old, returns = torch.zeros(4), torch.tensor([2.0, -1.0, -2.0, 0.3])
    values = torch.tensor([1.0, 1.0, -0.5, 0.1], requires_grad=True)
    losses, clipped = value_loss(values, old, returns, None)
    torch.testing.assert_close(losses, torch.tensor([0.5, 2.0, 1.125, 0.02]))
    assert not clipped.any()
    # Clipped values are 0.2, 0.2, -0.2, 0.1; the second has moved away from its return, so the plain square is larger.
    losses, clipped = value_loss(values, old, returns, 0.2)
    torch.testing.assert_close(losses, torch.tensor([1.8**2 / 2, 2.0, 1.8**2 / 2, 0.02]))
    assert clipped.tolist() == [True, False, True, False]
    losses.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([0.0, 2.0, 0.0, -0.2]))
    for clip in (0.05, 0.2, None):  # values that have not moved are pulled in full
        values = old.clone().requires_grad_()
        value_loss(values, old, returns, clip)[0].sum().backward()
        torch.testing.assert_close(values.grad, old - returns)
