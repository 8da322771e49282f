"""From episodes to advantages per token: masks, several streams, positions of rewards."""

import numpy as np
import pytest

from posttrain.credit.assign import compute_advantages, mean_advantage, reward_streams, zero_groups
from posttrain.episode import Advantages, StopReason, Turn
from posttrain.errors import RunError

from .episodes import episode, recipe


def test_environment_tokens_do_not_decay_credit_and_get_none():
    short, long = episode(("..ss.s", {5: 8.0})), episode(("..ss" + "." * 50 + "s", {54: 8.0}))
    credit = compute_advantages([short, long], recipe("reinforce", discount=0.5), reward_streams([short, long]))
    np.testing.assert_array_equal(credit.values[0][0], np.array([0, 0, 2, 4, 0, 8], dtype=np.float32))
    assert credit.values[0][0].dtype == np.float32
    np.testing.assert_array_equal(credit.values[1][0][long.streams[0].sampled], [2, 4, 8])
    assert not credit.values[1][0][~long.streams[0].sampled].any()


def test_returns_run_across_the_streams_of_an_episode():
    one = episode((".ss", {2: 1.0}), (".....s", {5: 4.0}))
    credit = compute_advantages([one], recipe("reinforce", discount=0.5), reward_streams([one]))
    np.testing.assert_array_equal(credit.values[0][0], [0, 1.5, 3])
    np.testing.assert_array_equal(credit.values[0][1], [0, 0, 0, 0, 0, 4])


def test_an_outcome_is_the_sum_over_streams_and_turns():
    several = episode((".ss.s", {2: 1.0, 4: 2.0}), (".s", {1: 4.0}), group=4)
    single = episode((".s", {1: 3.0}), group=4, index=1)
    credit = compute_advantages([several, single], recipe("dr_grpo"), reward_streams([several, single]))
    np.testing.assert_array_equal(credit.values[0][0], [0, 2, 2, 0, 2])
    np.testing.assert_array_equal(credit.values[0][1], [0, 2])
    np.testing.assert_array_equal(credit.values[1][0], [0, -2])


def test_groups_follow_the_ids_in_any_order():
    made = [episode((".s", {1: float(r)}), group=g) for g, r in [(1, 0), (2, 10), (1, 4), (2, 10), (1, 2)]]
    credit = compute_advantages(made, recipe("rloo"), reward_streams(made))
    np.testing.assert_array_equal([c[0][1] for c in credit.values], [-3, 0, 3, 0, 0])


def test_reward_streams_are_copies():
    one = episode((".s", {1: 1.0}))
    reward_streams([one]).values[0][0][1] = 5.0
    assert one.streams[0].rewards[1] == 1.0


@pytest.mark.parametrize(("paid", "words"), [({0: 1.0}, "did not sample"), ({1: np.nan}, "not finite")])
def test_a_reward_that_cannot_be_credited_names_its_episode(paid, words):
    one = episode((".s", paid), group=3, index=2)
    with pytest.raises(RunError, match=f"group 3 episode 2 .*{words}"):
        compute_advantages([one], recipe("grpo"), reward_streams([one]))


def test_the_mean_advantage_is_below_zero_where_failures_are_longer():
    """A success of one token, and a failure of three in two streams."""
    episodes = [episode(("..s", {2: 1.0})), episode(("..s", {}), (".s.s", {}), index=1)]
    credit = compute_advantages(episodes, recipe("grpo"), reward_streams(episodes))
    assert mean_advantage(episodes, credit, by_episode=False) == pytest.approx((1 - 3) / 4, abs=1e-5)
    assert mean_advantage(episodes, credit, by_episode=True) == pytest.approx(0, abs=1e-6)
    nothing = Advantages([[np.zeros(3, np.float32)]])
    assert mean_advantage(episodes[:1], nothing, by_episode=False) == 0


COMPARED = ["grpo", "dr_grpo", "rloo", "opo", "maxrl", "reinforce_pp_baseline", "pass_at_k", "mt_grpo", "gigpo"]
COMPARED += ["turn_returns", "optimal_token_baseline", "gdpo"]


def of_sizes(*sizes, b=1.0):
    """Groups of the given numbers of episodes, which earn 0, 1, 2, ... with one to three tokens, as their score a."""
    made = []
    for group, index in ((g, i) for g, n in enumerate(sizes) for i in range(n)):
        made.append(episode((".." + "s" * (1 + index % 3), {2: float(index)}), group=10 * group, index=index))
        info = {"scores": {"a": float(index), "b": b}}
        made[-1].turns.append(Turn(0, 2, len(made[-1].streams[0]), 0.0, StopReason.END_TOKEN, "", info))
    return made


@pytest.mark.parametrize("kind", COMPARED)
def test_episodes_without_another_one_to_compare_with_have_no_baseline(kind):
    for sizes, single in [((1, 3), {0}), ((3, 1, 2, 1), {3, 6}), ((2, 2), set()), ((1, 1), {0, 1}), ((), set())]:
        made = of_sizes(*sizes)
        energies = [[s.sampled.astype(np.float32) for s in e.streams] for e in made]
        credit = compute_advantages(made, recipe(kind), reward_streams(made), energies=energies)
        assert credit.without_baseline == single, sizes


def test_gdpo_takes_no_credit_from_the_further_scores_of_a_function_that_does_not_apply():
    made = of_sizes(3, b=None)
    credits = [
        compute_advantages(made, recipe("gdpo", weights={"a": 1.0, **more}), reward_streams(made)).values
        for more in ({}, {"b": 1.0}, {"b_part": 1.0})
    ]
    assert repr(credits[0]) == repr(credits[1]) == repr(credits[2])
    with pytest.raises(RunError, match="no episode of the step has the score 'c_part'"):
        compute_advantages(made, recipe("gdpo", weights={"a": 1.0, "c_part": 1.0}), reward_streams(made))


@pytest.mark.parametrize("kind", ["reinforce", "reinforce_pp", "arpo", "remax", "brpo"])
def test_credits_that_need_no_group_keep_groups_of_one(kind):
    made = of_sizes(1, 3)
    greedy = {0: 0.0, 10: 1.0}
    assert not compute_advantages(made, recipe(kind), reward_streams(made), greedy).without_baseline
    alone = compute_advantages(made[:1], recipe(kind), reward_streams(made[:1]), greedy)
    assert alone.without_baseline == ({0} if kind == "brpo" else set())
    assert not compute_advantages(made, recipe("turn_returns", baseline="none"), reward_streams(made)).without_baseline
    values = [[np.zeros(len(s), np.float32) for s in e.streams] for e in made]
    assert not compute_advantages(made, recipe("gae"), reward_streams(made), values=values).without_baseline


def test_equal_returns_are_a_baseline_without_signal():
    made = [episode((".s", {1: 1.0}), group=g, index=i) for g in (0, 1) for i in range(2)]
    credit = compute_advantages(made, recipe("grpo"), reward_streams(made))
    assert credit.without_baseline == set()
    assert zero_groups(made, credit) == 1


def test_gigpo_compares_the_turns_of_an_episode_that_returns_to_a_state():
    again = episode((".s.s", {1: 1.0}))
    again.streams[0].ids[:] = [5, 1, 5, 2]
    again.streams[0].turn[3] = 1
    other = episode((".s.s", {1: 1.0}), group=1)
    other.streams[0].turn[3] = 1
    credit = compute_advantages([again, other], recipe("gigpo"), reward_streams([again, other]))
    assert credit.without_baseline == {1}
    assert credit.values[0][0].any()


def test_metrics_of_credit_leave_out_groups_of_one():
    made = of_sizes(1, 3)
    for kind in ("dr_grpo", "reinforce_pp_baseline"):
        credit = compute_advantages(made, recipe(kind), reward_streams(made))
        rest = Advantages(credit.values[1:])
        assert zero_groups(made, credit) == 0
        for by_episode in (True, False):
            assert mean_advantage(made, credit, by_episode) == mean_advantage(made[1:], rest, by_episode)
