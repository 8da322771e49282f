"""Returns per turn by hand, and the baseline of the others where episodes end at different turns."""

import numpy as np

from posttrain.credit.turns import leave_one_out, turn_returns


def test_the_discount_counts_turns():
    found = turn_returns([np.array([1.0, 0.0, 4.0]), np.array([2.0]), np.zeros(0)], 0.5)
    np.testing.assert_array_equal(found[0], [1 + 0 + 1, 2, 4])
    np.testing.assert_array_equal(found[1], [2])
    assert len(found[2]) == 0


def test_ended_episodes_count_as_zero():
    returns = [np.array([6.0, 4.0, 1.0]), np.array([2.0]), np.array([1.0, 3.0])]
    found = leave_one_out(returns, np.array([5, 5, 5]))
    np.testing.assert_allclose(found[0], [6 - 1.5, 4 - 1.5, 1 - 0], rtol=1e-12)
    np.testing.assert_allclose(found[1], [2 - 3.5], rtol=1e-12)
    np.testing.assert_allclose(found[2], [1 - 4, 3 - 2], rtol=1e-12)


def test_groups_of_different_sizes_follow_the_ids_and_a_single_episode_gets_zero():
    returns = [np.array([1.0]), np.array([9.0, 9.0]), np.array([4.0]), np.array([2.0, 2.0]), np.array([3.0, 1.0])]
    found = leave_one_out(returns, np.array([8, 2, 8, 4, 4]))
    np.testing.assert_array_equal(np.concatenate(found), [-3, 0, 0, 3, -1, 1, 1, -1])


def test_equal_returns_give_exactly_zero():
    assert not np.concatenate(leave_one_out([np.full(3, 0.1)] * 3, np.zeros(3, int))).any()
