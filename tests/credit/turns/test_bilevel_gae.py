"""bilevel_gae by hand, against gae, and against the published recursion."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from posttrain.credit.critic import bilevel_gae
from posttrain.credit.returns import gae


def published(rewards, values, turns, discount, turn_discount, gae_lambda):
    """The published two passes, with turn ends handed in: the turn level rests on values of the last tokens."""
    ends = np.flatnonzero(np.diff(turns, append=turns[-1] + 1))
    targets, advantage, after = {}, 0.0, 0.0
    for e in ends[::-1]:
        advantage = rewards[e] + turn_discount * after - values[e] + turn_discount * gae_lambda * advantage
        targets[int(e)], after = advantage + values[e], values[e]
    found, running = np.zeros(len(rewards)), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        if t in targets:
            running = targets[t] - values[t]
        else:
            running = discount * values[t + 1] - values[t] + discount * gae_lambda * running
        found[t] = running
    return found


def test_two_turns_by_hand():
    rewards, values = np.array([0.0, 1.0, 0.0, 4.0]), np.array([2.0, 1.0, 3.0, 5.0])
    (found,) = bilevel_gae([rewards], [values], [np.array([0, 0, 1, 1])], 0.5, 0.25, 0.5, 0.5)
    # Turn 2: A = 4 - 5 at its end, 0.5 x 5 - 3 + 0.25 x -1 at its first token; B = 0.5 x 4 - 3 = -1.
    # After turn 1: 0.25 x (3 + 0.5 x -1) = 0.625. A = 1 + 0.625 - 1 at its end, 0.5 x 1 - 2 + 0.25 x 0.625 before.
    np.testing.assert_allclose(found, [-1.34375, 0.625, -0.75, -1.0], rtol=1e-12)


episodes = st.integers(1, 8).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(-3, 3), min_size=n, max_size=n).map(np.array),
        st.lists(st.floats(-3, 3), min_size=n, max_size=n).map(np.array),
        st.lists(st.integers(0, 2), min_size=n, max_size=n).map(sorted).map(np.array),
    )
)
shares = st.floats(0.1, 1)


@given(played=episodes, discount=shares, decay=shares, other=shares)
def test_with_one_turn_it_is_gae(played, discount, decay, other):
    rewards, values, turns = played
    (found,) = bilevel_gae([rewards], [values], [np.zeros_like(turns)], discount, other, decay, other)
    np.testing.assert_allclose(found, gae([rewards], [values], discount, decay)[0], atol=1e-9)


@given(played=episodes)
def test_without_discounts_and_traces_it_is_return_minus_value(played):
    rewards, values, turns = played
    (found,) = bilevel_gae([rewards], [values], [turns], 1.0, 1.0, 1.0, 1.0)
    np.testing.assert_allclose(found, np.cumsum(rewards[::-1])[::-1] - values, atol=1e-9)


@given(played=episodes, discount=shares, decay=shares)
def test_turns_of_one_token_are_gae_over_turns(played, discount, decay):
    rewards, values, _ = played
    (found,) = bilevel_gae([rewards], [values], [np.arange(len(rewards))], 0.3, discount, 0.3, decay)
    np.testing.assert_allclose(found, gae([rewards], [values], discount, decay)[0], atol=1e-9)


@given(played=episodes, turn_discount=shares)
def test_it_equals_the_published_formula_without_decay(played, turn_discount):
    rewards, values, turns = played
    at_ends = np.where(np.diff(turns, append=9) > 0, rewards, 0.0)
    (found,) = bilevel_gae([at_ends], [values], [turns], 1.0, turn_discount, 1.0, 1.0)
    np.testing.assert_allclose(found, published(at_ends, values, turns, 1.0, turn_discount, 1.0), atol=1e-9)


def test_a_turn_without_reward_still_ends():
    rewards, values = np.array([0.0, 0.0, 1.0]), np.zeros(3)
    (two,) = bilevel_gae([rewards], [values], [np.array([0, 0, 1])], 1.0, 0.5, 1.0, 1.0)
    (one,) = bilevel_gae([rewards], [values], [np.array([0, 0, 0])], 1.0, 0.5, 1.0, 1.0)
    np.testing.assert_array_equal(two, [0.5, 0.5, 1])
    np.testing.assert_array_equal(one, [1, 1, 1])


def test_a_penalty_at_every_token_counts_once():
    (found,) = bilevel_gae([np.full(4, -1.0)], [np.zeros(4)], [np.array([0, 0, 1, 1])], 1.0, 1.0, 1.0, 1.0)
    np.testing.assert_array_equal(found, [-4, -3, -2, -1])
