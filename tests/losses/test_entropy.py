"""Entropy control computed by hand: the selected tokens."""

import numpy as np
import pytest

from posttrain.losses.entropy import clip_cov, covariances, kl_cov, top_entropy
from posttrain.recipe.loss import ClipCovRecipe, KlCovRecipe


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


def test_clip_cov_draws_among_the_tokens_between_its_bounds():
    values = np.array([0.5, 2.0, 3.0, 9.0, 4.0, 1.5, 0.0, 0.0, 0.0, 0.0])
    recipe = ClipCovRecipe(share=0.2, low=1.0, high=5.0)
    drawn = [clip_cov(recipe, values, np.random.default_rng(seed)) for seed in range(40)]
    assert all(chosen.sum() == 2 for chosen in drawn)
    assert np.flatnonzero(np.any(drawn, axis=0)).tolist() == [1, 2, 4, 5]
    few = ClipCovRecipe(share=0.9, low=1.0, high=5.0)
    assert np.flatnonzero(clip_cov(few, values, np.random.default_rng(0))).tolist() == [1, 2, 4, 5]
    assert not clip_cov(recipe, np.zeros(5), np.random.default_rng(0)).any()


def test_kl_cov_takes_the_largest():
    assert np.flatnonzero(kl_cov(KlCovRecipe(share=0.5), np.array([1.0, 3.0, 3.0, -5.0]))).tolist() == [1, 2]
    assert np.flatnonzero(kl_cov(KlCovRecipe(), np.array([1.0, 3.0, 3.0]))).tolist() == [1]
