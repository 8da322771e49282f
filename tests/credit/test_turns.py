"""Turn-level credit by hand: turns, returns per turn, `mt_grpo`, `gigpo`, and all through `compute_advantages`."""

import numpy as np
import pytest

from posttrain.credit.assign import compute_advantages, reward_streams
from posttrain.credit.baselines import dr_grpo, grpo
from posttrain.credit.turns import (
    gigpo,
    leave_one_out,
    mt_grpo,
    state_keys,
    turn_indices,
    turn_returns,
    turn_rewards,
    turn_starts,
)
from posttrain.episode import Advantages, RewardStreams
from posttrain.errors import RunError

from .episodes import episode, recipe

KINDS = ["turn_returns", "mt_grpo", "gigpo", "bilevel_gae"]
REWARDS = [np.array([0.0, 4.0]), np.array([2.0]), np.array([0.0, 0.0, 6.0])]
STATES = [["a", "b"], ["a"], ["a", "c", "b"]]
ONE = np.zeros(3, int)
TWO, SEVEN = np.sqrt(2.0) + 1e-6, np.sqrt(7.0) + 1e-6


# -- turns and their states -------------------------------------------------------------------------------------------


def test_a_turn_without_reward_counts_as_a_turn():
    turns = np.array([0, 0, 1, 2, 2, 2])
    np.testing.assert_array_equal(turn_starts(turns), [0, 2, 3])
    np.testing.assert_array_equal(turn_rewards(np.array([0.0, 1, 0, 0, 0.5, 2]), turns), [1, 0, 2.5])


def test_turns_run_across_streams_and_answers_that_touch_are_two():
    played = episode(".0011", "..2")
    np.testing.assert_array_equal(turn_indices(played), [0, 0, 1, 1, 2])
    assert len(state_keys(played)) == 3
    empty = episode("...")
    assert len(turn_indices(empty)) == len(turn_rewards(np.zeros(0), turn_indices(empty))) == 0
    assert state_keys(empty) == []
    with pytest.raises(RunError, match=r"group 0 episode 0 .* turns out of order"):
        turn_indices(episode(".10"))


def test_states_are_the_tokens_shown_since_the_last_answer():
    first, second, third, fourth = state_keys(episode("..0.1.2..3", ids=[[7, 8, 1, 5, 2, 5, 3, 7, 8, 4]]))
    assert second == third  # token 5 after two different answers
    assert first == fourth  # tokens 7, 8, at the start and at the end
    assert first != second
    # Ids 1, 2 are not id 12: no text is made of them.
    assert state_keys(episode("..0", ids=[[1, 2, 9]])) != state_keys(episode(".0", ids=[[12, 9]]))


def test_a_name_from_the_environment_precedes_token_names():
    one, other, third = (
        state_keys(episode(".0", ids=[[token, 9]], states=[name])) for token, name in ((1, "a"), (2, "a"), (1, "b"))
    )
    assert one == other == [("named", "a")]
    assert one != third


# -- returns per turn -------------------------------------------------------------------------------------------------


def test_the_discount_counts_turns():
    found = turn_returns([np.array([1.0, 0.0, 4.0]), np.array([2.0]), np.zeros(0)], 0.5)
    np.testing.assert_array_equal(found[0], [1 + 0 + 1, 2, 4])
    np.testing.assert_array_equal(found[1], [2])
    assert len(found[2]) == 0


def test_of_the_others_ended_episodes_count_as_zero():
    returns = [np.array([6.0, 4.0, 1.0]), np.array([2.0]), np.array([1.0, 3.0])]
    found = leave_one_out(returns, np.array([5, 5, 5]))
    np.testing.assert_allclose(found[0], [6 - 1.5, 4 - 1.5, 1 - 0], rtol=1e-12)
    np.testing.assert_allclose(found[1], [2 - 3.5], rtol=1e-12)
    np.testing.assert_allclose(found[2], [1 - 4, 3 - 2], rtol=1e-12)
    # Groups of different sizes follow the ids, and a single episode gets 0.
    returns = [np.array([1.0]), np.array([9.0, 9.0]), np.array([4.0]), np.array([2.0, 2.0]), np.array([3.0, 1.0])]
    found = leave_one_out(returns, np.array([8, 2, 8, 4, 4]))
    np.testing.assert_array_equal(np.concatenate(found), [-3, 0, 0, 3, -1, 1, 1, -1])
    assert not np.concatenate(leave_one_out([np.full(3, 0.1)] * 3, np.zeros(3, int))).any()


# -- mt_grpo: the published two turns, more of them, and groups that do not fit its assumptions -----------------------


def test_two_turns_are_the_published_formula():
    # Turn rewards 1, 2, 6 (mean 3, sample variance 7) and outcomes 0, 1, 2 (mean 1, sample variance 1).
    rewards = [np.array([1.0, 0.0]), np.array([2.0, 1.0]), np.array([6.0, 2.0])]
    outcome = np.array([-1, 0, 1]) / (1 + 1e-6)
    for weight in (0.5, 0.0):
        found = mt_grpo(rewards, np.zeros(3, int), weight)
        first = weight * np.array([-2, -1, 3]) / SEVEN + outcome
        np.testing.assert_allclose([own[0] for own in found], first, rtol=1e-12)
        np.testing.assert_allclose([own[1] for own in found], outcome, rtol=1e-12)


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


# -- gigpo: episodes against their group, turns against those in the same state ---------------------------------------


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


@pytest.mark.parametrize(("divide", "baseline"), [(True, grpo), (False, dr_grpo)])
def test_without_repeated_states_it_is_the_group_baseline(divide, baseline):
    states = [["a", "b"], ["c"], ["d", "e", "f"]]
    found = gigpo(REWARDS, states, ONE, 0.95, 1.0, divide)
    for own, advantage in zip(found, baseline(np.array([4.0, 2.0, 6.0]), ONE), strict=True):
        np.testing.assert_allclose(own, advantage, rtol=1e-12)


def test_states_are_compared_within_groups_and_within_an_episode_that_visits_one_twice():
    rewards = [np.array([1.0]), np.array([3.0]), np.array([8.0])]
    found = gigpo(rewards, [["a"], ["a"], ["a"]], np.array([7, 7, 9]), 1.0, 1.0, divide_by_std=False)
    np.testing.assert_array_equal(np.concatenate(found), [-2, 2, 0])
    found = gigpo([np.array([1.0, 3.0])], [["a", "a"]], np.zeros(1, int), 1.0, 1.0, divide_by_std=False)
    np.testing.assert_array_equal(found[0], [0.5, -0.5])  # 4 and 3 from there on


# -- through `compute_advantages`: tokens of the environment, several streams, rewards inside a turn ------------------


def credit_of(episodes, chosen):
    values = [[np.ones(len(s)) for s in e.streams] for e in episodes]
    return compute_advantages(episodes, chosen, reward_streams(episodes), values=values).values


def test_every_token_of_a_turn_gets_the_credit_of_the_turn_across_streams():
    chosen = recipe("turn_returns", discount=0.5, baseline="none")
    (first, second) = credit_of([episode(("..00.1", {3: 1.0, 5: 2.0}), ("....22", {5: 8.0}))], chosen)[0]
    np.testing.assert_array_equal(first, np.array([0, 0, 4, 4, 0, 6], dtype=np.float32))
    np.testing.assert_array_equal(second, [0, 0, 0, 0, 8, 8])
    assert first.dtype == np.float32


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_the_environment_and_long_answers_do_not_decay_credit_over_turns(kind):
    def group(shown, length):
        marks = ".." + "0" * length + "." * shown + "1" * length
        paid = [(0.0, 1.0), (2.0, 5.0), (1.0, 3.0)]
        return [
            episode((marks, {1 + length: a, len(marks) - 1: b}), index=i, states=["start", "middle"])
            for i, (a, b) in enumerate(paid)
        ]

    short, long = group(1, 2), group(9, 2)
    found, same = (credit_of(made, recipe(kind)) for made in (short, long))
    for i in range(3):
        mask, other = short[i].streams[0].sampled, long[i].streams[0].sampled
        np.testing.assert_array_equal(found[i][0][mask], same[i][0][other])
        assert not found[i][0][~mask].any()
    if kind != "bilevel_gae":  # its tokens differ within a turn, by their values
        longer = credit_of(group(1, 7), recipe(kind))
        np.testing.assert_array_equal([own[0][2] for own in longer], [own[0][2] for own in found])


@pytest.mark.parametrize("kind", KINDS)
def test_where_a_stream_is_split_changes_nothing(kind):
    whole = [episode(("..00..11", {3: 1.0, 7: 2.0}), states=["a", "b"]), episode(("..00", {3: 2.0}), states=["a"])]
    split = [episode(("..00", {3: 1.0}), ("......11", {7: 2.0}), states=["a", "b"]), whole[1]]
    one, two = (credit_of(made, recipe(kind)) for made in (whole, split))
    np.testing.assert_array_equal(one[0][0][[2, 3, 6, 7]], np.concatenate([two[0][0][2:], two[0][1][6:]]))


def test_rewards_inside_a_turn_are_the_turns():
    spread, at_end = episode((".000.1", {1: 0.5, 2: 0.25, 3: 0.25, 5: 4.0})), episode((".000.1", {3: 1.0, 5: 4.0}))
    chosen = recipe("turn_returns", baseline="none")
    np.testing.assert_array_equal(credit_of([spread], chosen)[0][0], credit_of([at_end], chosen)[0][0])


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_different_sizes_and_episodes_of_different_turns_in_any_order(kind):
    made = [
        episode((".0.1", {1: 1.0, 3: 1.0}), group=1),
        episode((".0", {1: 3.0}), group=5),
        episode((".0", {1: 4.0}), group=1, index=1),
        episode((".0.1.2", {3: 1.0, 5: 2.0}), group=1, index=2),
        episode((".0.1", {3: 7.0}), group=5, index=1),
    ]
    order = [3, 1, 4, 0, 2]
    straight, turned = (credit_of(e, recipe(kind)) for e in (made, [made[i] for i in order]))
    for place, own in zip(order, turned, strict=True):
        np.testing.assert_array_equal(straight[place][0], own[0], err_msg=kind)
    assert any(own[0].any() for own in straight)


@pytest.mark.parametrize("kind", [*KINDS, "grpo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "opo", "brpo"])
def test_no_episodes_and_an_episode_without_sampled_tokens(kind):
    assert compute_advantages([], recipe(kind), RewardStreams([]), values=[]) == Advantages([])
    made = [episode("..."), episode((".0.1", {1: 1.0, 3: 1.0}), index=1)]
    assert not credit_of(made, recipe(kind))[0][0].any()
