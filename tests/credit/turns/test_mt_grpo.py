"""mt_grpo by hand: the published two turns, more of them, and groups that do not fit its assumptions."""

import numpy as np

from posttrain.credit.turns import mt_grpo

TWO, SEVEN = np.sqrt(2.0) + 1e-6, np.sqrt(7.0) + 1e-6


def test_two_turns_are_the_published_formula():
    # Turn rewards 1, 2, 6 (mean 3, sample variance 7) and outcomes 0, 1, 2 (mean 1, sample variance 1).
    rewards = [np.array([1.0, 0.0]), np.array([2.0, 1.0]), np.array([6.0, 2.0])]
    found = mt_grpo(rewards, np.zeros(3, int), 0.5)
    outcome = np.array([-1, 0, 1]) / (1 + 1e-6)
    np.testing.assert_allclose([own[0] for own in found], 0.5 * np.array([-2, -1, 3]) / SEVEN + outcome, rtol=1e-12)
    np.testing.assert_allclose([own[1] for own in found], outcome, rtol=1e-12)


def test_without_weight_a_turn_gets_only_the_outcome():
    rewards = [np.array([7.0, 0.0]), np.array([2.0, 1.0])]
    found = mt_grpo(rewards, np.zeros(2, int), 0.0)
    np.testing.assert_allclose(found, np.array([[-0.5, -0.5], [0.5, 0.5]]) / (np.sqrt(0.5) + 1e-6), rtol=1e-12)


def test_every_turn_before_the_last_has_separate_statistics():
    rewards = [np.array([0.0, 5.0, 1.0]), np.array([2.0, 5.0, 1.0])]
    found = mt_grpo(rewards, np.zeros(2, int), 1.0)
    np.testing.assert_allclose(found, [[-1 / TWO, 0, 0], [1 / TWO, 0, 0]], rtol=1e-12)


def test_episodes_that_ended_are_not_in_the_statistics_of_later_turns():
    rewards = [np.array([3.0]), np.array([0.0, 9.0, 3.0]), np.array([2.0, 7.0, 3.0]), np.array([4.0, 3.0])]
    found = mt_grpo(rewards, np.zeros(4, int), 1.0)
    np.testing.assert_array_equal(found[0], [0])  # its only turn is an outcome, and those are equal
    np.testing.assert_allclose([own[0] for own in found[1:]], np.array([-2, 0, 2]) / (2 + 1e-6), rtol=1e-12)
    np.testing.assert_allclose([found[1][1], found[2][1]], np.array([1, -1]) / TWO, rtol=1e-12)
    assert found[3][1] == 0


def test_groups_follow_the_ids_and_a_single_episode_gets_zero():
    rewards = [np.array([1.0, 1.0]), np.array([5.0, 5.0]), np.array([1.0, 3.0]), np.zeros(0)]
    found = mt_grpo(rewards, np.array([1, 2, 1, 2]), 1.0)
    np.testing.assert_allclose(found[0], [-1 / TWO, -1 / TWO], rtol=1e-12)
    np.testing.assert_array_equal(found[1], [0, 0])
    np.testing.assert_allclose(found[2], [1 / TWO, 1 / TWO], rtol=1e-12)
    assert len(found[3]) == 0
