"""gigpo by hand: episodes against their group, turns against those in the same state."""

import numpy as np
import pytest

from posttrain.credit.baselines import dr_grpo, grpo
from posttrain.credit.turns import gigpo

REWARDS = [np.array([0.0, 4.0]), np.array([2.0]), np.array([0.0, 0.0, 6.0])]
STATES = [["a", "b"], ["a"], ["a", "c", "b"]]
ONE = np.zeros(3, int)


def test_both_levels_by_hand():
    # Returns 4, 2, 6. With discount 1/2, from each turn on: 2, 4; 2; 1.5, 3, 6.
    found = gigpo(REWARDS, STATES, ONE, 0.5, 10.0, divide_by_std=False)
    in_a, in_b = (2 + 2 + 1.5) / 3, (4 + 6) / 2
    np.testing.assert_allclose(found[0], [0 + 10 * (2 - in_a), 0 + 10 * (4 - in_b)], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found[1], [-2 + 10 * (2 - in_a)], rtol=1e-12)
    np.testing.assert_allclose(found[2], [2 + 10 * (1.5 - in_a), 2, 2 + 10 * (6 - in_b)], rtol=1e-12)


def test_each_level_is_divided_by_its_own_sample_deviation():
    found = gigpo(REWARDS, STATES, ONE, 0.5, 1.0, divide_by_std=True)
    in_a = np.array([2, 2, 1.5])
    np.testing.assert_allclose(found[1], -2 / (2 + 1e-6) + (2 - in_a.mean()) / (in_a.std(ddof=1) + 1e-6), rtol=1e-12)
    np.testing.assert_allclose(found[2][1], 2 / (2 + 1e-6), rtol=1e-12)
    np.testing.assert_allclose(found[2][2], 2 / (2 + 1e-6) + 1 / (np.sqrt(2) + 1e-6), rtol=1e-12)


@pytest.mark.parametrize(("divide", "alone"), [(True, grpo), (False, dr_grpo)])
def test_without_repeated_states_it_is_the_group_baseline(divide, alone):
    states = [["a", "b"], ["c"], ["d", "e", "f"]]
    found = gigpo(REWARDS, states, ONE, 0.95, 1.0, divide)
    expected = alone(np.array([4.0, 2.0, 6.0]), ONE)
    for own, advantage in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, advantage, rtol=1e-12)


def test_states_of_different_groups_are_not_compared():
    rewards = [np.array([1.0]), np.array([3.0]), np.array([8.0])]
    found = gigpo(rewards, [["a"], ["a"], ["a"]], np.array([7, 7, 9]), 1.0, 1.0, divide_by_std=False)
    np.testing.assert_array_equal(np.concatenate(found), [-2, 2, 0])


def test_a_state_that_one_episode_visits_twice_is_compared_with_itself():
    found = gigpo([np.array([1.0, 3.0])], [["a", "a"]], np.zeros(1, int), 1.0, 1.0, divide_by_std=False)
    np.testing.assert_array_equal(found[0], [0.5, -0.5])  # 4 and 3 from there on


def test_order_of_episodes_changes_no_bit():
    order = [2, 0, 1]
    straight = gigpo(REWARDS, STATES, ONE, 0.95, 1.0, divide_by_std=True)
    turned = gigpo([REWARDS[i] for i in order], [STATES[i] for i in order], ONE, 0.95, 1.0, divide_by_std=True)
    for place, own in zip(order, turned, strict=True):
        np.testing.assert_array_equal(straight[place], own)


def test_no_episodes_get_no_credit():
    assert gigpo([], [], np.zeros(0, int), 0.95, 1.0, divide_by_std=True) == []
    assert [len(own) for own in gigpo([np.zeros(0)], [[]], np.zeros(1, int), 0.95, 1.0, divide_by_std=True)] == [0]
