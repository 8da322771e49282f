"""Each baseline computed by hand, and properties that all of them share."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.credit.baselines import gdpo, grpo, maxrl, pass_at_k, remax, standardize
from posttrain.credit.returns import optimal_token_baseline, reinforce, reinforce_pp, reinforce_pp_baseline
from posttrain.errors import RunError
from posttrain.recipe.credit import CREDITS

# Group 7 holds 1, 2, 6 (mean 3, sample variance (4 + 1 + 9) / 2 = 7); group 3 holds 0, 4.
RETURNS = np.array([1.0, 0.0, 2.0, 4.0, 6.0])
GROUPS = np.array([7, 3, 7, 3, 7])
LENGTHS = np.array([1, 3, 2, 1, 5])
GREEDY = {7: 1.5, 3: -1.0}


def outcome_baseline(name):
    """A registered credit as (returns, groups, lengths, greedy) -> [N]."""
    credit = CREDITS.make(name)

    def compute(*given):
        named = dict(zip(("returns", "groups", "lengths", "greedy"), given, strict=True))
        return credit.compute(**{key: value for key, value in named.items() if key in credit.inputs})

    return compute


OUTCOME_BASELINES = {
    name: outcome_baseline(name) for name in ("grpo", "dr_grpo", "rloo", "opo", "remax", "brpo", "arpo", "maxrl")
}


_SEVEN, _THREE = np.sqrt(7.0) + 1e-6, np.sqrt(8.0) + 1e-6
_OPO = {7: (1 * 1 + 2 * 2 + 5 * 6) / 8, 3: (3 * 0 + 1 * 4) / 4}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [-2 / _SEVEN, -2 / _THREE, -1 / _SEVEN, 2 / _THREE, 3 / _SEVEN]),
        ("dr_grpo", [-2, -2, -1, 2, 3]),
        ("rloo", [1 - 4, 0 - 4, 2 - 3.5, 4 - 0, 6 - 1.5]),
        ("opo", [1 - _OPO[7], 0 - _OPO[3], 2 - _OPO[7], 4 - _OPO[3], 6 - _OPO[7]]),
        ("remax", [-0.5, 1, 0.5, 5, 4.5]),
        ("brpo", (RETURNS - 2.6) / (RETURNS.std(ddof=1) + 1e-6)),
        ("arpo", RETURNS),
        ("maxrl", [-2 / 3, -1, -1 / 3, 1, 1]),
    ],
)
def test_baselines_by_hand(name, expected):
    np.testing.assert_allclose(OUTCOME_BASELINES[name](RETURNS, GROUPS, LENGTHS, GREEDY), expected, rtol=1e-12)


def test_maxrl_of_one_success_in_four_weighs_4_minus_1_as_1_over_p_does():
    np.testing.assert_allclose(maxrl(np.eye(4)[0], np.zeros(4, int)), [3, -1, -1, -1])


def test_remax_names_the_group_without_a_greedy_episode():
    with pytest.raises(RunError, match="group 7"):
        remax(RETURNS, GROUPS, {3: 1.0})


def test_maxrl_refuses_returns_below_0_and_names_the_group():
    with pytest.raises(RunError, match=r"group 3 has -0\.5; remove penalties"):
        maxrl(np.array([1.0, -0.5]), np.array([7, 3]))


def by_enumeration(returns, k):
    """Each episode's gain for the best of k, over all sets of k that contain it."""
    places = range(len(returns))
    gains: list[list[float]] = [[] for _ in places]
    for chosen in itertools.combinations(places, k):
        for i in chosen:
            others = [returns[j] for j in chosen if j != i]
            gains[i].append(max(returns[i], *others) - max(others))
    return [np.mean(own) for own in gains]


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 3.0]), min_size=2, max_size=6), st.integers(2, 6))
@settings(max_examples=60, deadline=None)
def test_pass_at_k_is_the_gain_for_the_best_of_k(returns, k):
    found = pass_at_k(np.array(returns), np.zeros(len(returns), int), k)
    np.testing.assert_allclose(found, by_enumeration(returns, min(k, len(returns))), atol=1e-12)


def test_pass_at_k_of_the_whole_group_credits_its_single_best():
    np.testing.assert_allclose(pass_at_k(RETURNS, GROUPS, None), [0, 0, 0, 4, 4])
    assert not pass_at_k(np.array([1.0, 1.0, 0.0]), np.zeros(3, int), None).any()  # one more success changes nothing
    assert not pass_at_k(np.array([5.0, 2.0, 2.0]), np.array([0, 1, 1]), 2).any()
    # Each of two successes in four is the only one in two of the three pairs that it is in.
    np.testing.assert_allclose(pass_at_k(np.array([1.0, 1, 0, 0]), np.zeros(4, int), 2), [2 / 3, 2 / 3, 0, 0])


def test_gdpo_normalises_each_score_then_the_sum():
    scores = np.array([[0.0, 1.0], [1.0, 1.0], [2.0, 4.0], [0.0, 10.0], [0.0, np.nan]])
    groups, weights = np.array([0, 0, 0, 1, 1]), np.array([2.0, 1.0])
    first = standardize(scores[:3, 0], 1)
    second = standardize(scores[:3, 1], 1)
    # In group 1 the first score is equal, and only one episode has the second.
    expected = standardize(np.array([*(2 * first + second), 0.0, 0.0]), 1)
    np.testing.assert_allclose(gdpo(scores, weights, groups), expected, rtol=1e-12)
    order = np.array([3, 0, 4, 2, 1])
    np.testing.assert_array_equal(gdpo(scores[order], weights, groups[order]), gdpo(scores, weights, groups)[order])
    assert gdpo(np.zeros((0, 2)), weights, groups[:0]).shape == (0,)


def test_gdpo_distinguishes_scores_with_equal_sums():
    # The paper's example: rewards (0, 1) and (0, 2) of groups of two have the same grpo advantages, and others here.
    scores = np.array([[0.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]])
    groups = np.array([0, 0, 1, 1])
    np.testing.assert_allclose(grpo(scores.sum(1), groups)[[1, 3]], [0.5**0.5] * 2, rtol=1e-5)
    advantages = gdpo(scores, np.ones(2), groups)
    assert advantages[3] == pytest.approx(2 * advantages[1], rel=1e-6)


def test_gdpo_of_one_score_is_grpo_normalised_over_the_batch():
    expected = standardize(grpo(RETURNS, GROUPS), 1)
    np.testing.assert_allclose(gdpo(RETURNS[:, None], np.ones(1), GROUPS), expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "maxrl"])
def test_a_group_of_one_has_no_signal(name):
    advantages = OUTCOME_BASELINES[name](np.array([5.0, 1.0, 2.0]), np.array([0, 1, 1]), np.array([3, 3, 3]), {})
    assert advantages[0] == 0.0
    assert advantages[1] < 0 < advantages[2]


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in ("grpo", "dr_grpo", "rloo", "opo", "brpo") for value in (0.1, -0.3, 1e9)]
    + [("maxrl", value) for value in (0.0, 0.1, 1e9)],
)
def test_equal_returns_give_exactly_zero(name, value):
    advantages = OUTCOME_BASELINES[name](np.full(3, value), np.zeros(3, int), np.array([1, 2, 7]), {})
    assert (advantages == 0.0).all()


def test_returns_that_differ_only_by_rounding_are_equal():
    returns = np.array([np.float32(0.1) + np.float64(np.float32(0.2)), np.float32(0.3)], dtype=np.float64)
    assert returns[0] != returns[1]
    assert (grpo(returns, np.zeros(2, int)) == 0.0).all()


def test_an_empty_batch_stays_empty():
    nothing = np.zeros(0)
    for baseline in OUTCOME_BASELINES.values():
        assert len(baseline(nothing, nothing.astype(int), nothing.astype(int), {})) == 0
    assert reinforce_pp([]) == []


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_order_of_episodes_changes_no_bit(data):
    size = data.draw(st.integers(1, 9))
    returns = np.array(
        data.draw(st.lists(st.floats(-10, 10, width=32), min_size=size, max_size=size)), dtype=np.float64
    )
    groups = np.array(data.draw(st.lists(st.sampled_from([2, 5, 11]), min_size=size, max_size=size)))
    lengths = np.array(data.draw(st.lists(st.integers(1, 6), min_size=size, max_size=size)))
    order = np.array(data.draw(st.permutations(range(size))))
    greedy = {2: 0.5, 5: -1.0, 11: 0.0}
    for name, baseline in {**OUTCOME_BASELINES, "pass_at_k": lambda r, g, *_: pass_at_k(r, g, 3)}.items():
        returns = np.abs(returns) if name == "maxrl" else returns
        straight = baseline(returns, groups, lengths, greedy)
        shuffled = baseline(returns[order], groups[order], lengths[order], greedy)
        np.testing.assert_array_equal(straight[order], shuffled, err_msg=name)
    whole = reinforce_pp_baseline(returns, groups, lengths)
    parts = reinforce_pp_baseline(returns[order], groups[order], lengths[order])
    for place, part in zip(order, parts, strict=True):
        np.testing.assert_array_equal(whole[place], part)


def test_optimal_token_baseline_weights_returns_by_cumulative_energy():
    rewards = [np.array([0.0, 1.0, 4.0]), np.array([1.0, 2.0]), np.array([9.0])]
    energies = [np.array([0.5, 0.25, 0.3]), np.array([0.1, 0.4]), np.array([0.2])]
    # Returns 5, 5, 4 and 3, 2; energies so far 0.5, 0.75, 1.05 and 0.1, 0.5.
    first, second = (0.5 * 5 + 0.1 * 3) / 0.6, (0.75 * 5 + 0.5 * 2) / 1.25
    found = optimal_token_baseline(rewards, energies, np.array([0, 0, 1]))
    np.testing.assert_allclose(found[0], [5 - first, 5 - second, 4.0])  # nothing to compare the third token with
    np.testing.assert_allclose(found[1], [3 - first, 2 - second])
    np.testing.assert_array_equal(found[2], [0.0])
    equal = optimal_token_baseline([np.array([0.0, 1.0]), np.array([0.0, 1.0])], energies[:2], np.zeros(2, int))
    assert not np.concatenate(equal).any()


def test_reinforce_discounts_per_sampled_token():
    found = reinforce([np.array([0.0, 1.0, 0.0, 4.0]), np.array([2.0])], discount=0.5)
    np.testing.assert_allclose(found[0], [0.5 + 4 / 8, 1 + 4 / 4, 2, 4], rtol=1e-12)
    np.testing.assert_allclose(found[1], [2.0], rtol=1e-12)


def test_reinforce_pp_whitens_over_tokens():
    # Returns from each token on: 3, 3, 1 and 5: mean 3, population variance (0 + 0 + 4 + 4) / 4 = 2.
    found = reinforce_pp([np.array([0.0, 2.0, 1.0]), np.array([5.0])])
    scale = np.sqrt(2.0) + 1e-6
    np.testing.assert_allclose(np.concatenate(found), [0, 0, -2 / scale, 2 / scale], atol=1e-12)


def test_reinforce_pp_baseline_whitens_over_tokens():
    # Episodes of 3 and 1 tokens with advantages -1 and 1: mean -0.5, population variance 3/4.
    found = reinforce_pp_baseline(np.array([0.0, 2.0]), np.array([0, 0]), np.array([3, 1]))
    scale = np.sqrt(0.75) + 1e-6
    np.testing.assert_allclose(found[0], np.full(3, -0.5 / scale), rtol=1e-12)
    np.testing.assert_allclose(found[1], [1.5 / scale], rtol=1e-12)


def test_a_group_of_one_changes_no_batch_statistics():
    returns, groups, lengths = np.array([0.0, 2.0, 5.0, 6.0]), np.array([0, 0, 0, 7]), np.array([3, 1, 2, 4])
    alone = reinforce_pp_baseline(returns[:3], groups[:3], lengths[:3])
    beside = reinforce_pp_baseline(returns, groups, lengths)
    np.testing.assert_allclose(np.concatenate(beside), [*np.concatenate(alone), 0, 0, 0, 0], rtol=1e-12)
    scores, weights = np.array([[0.0, 1.0], [2.0, 0.0], [5.0, 7.0], [6.0, 9.0]]), np.array([1.0, 2.0])
    expected = [*gdpo(scores[:3], weights, groups[:3]), 0.0]
    np.testing.assert_allclose(gdpo(scores, weights, groups), expected, rtol=1e-12)
