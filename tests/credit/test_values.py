"""GAE on one level and on two: by hand, its limits, the tokens it runs over, and its bias on the process whose
episodes are all enumerated."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from posttrain.credit.assign import compute_advantages, reward_streams
from posttrain.credit.critic import bilevel_gae
from posttrain.credit.returns import explained_variance, gae, length_adaptive_lambda, reinforce
from posttrain.recipe.credit import CreditRecipe

from .decision_process import STATES, Trajectory, episode, score, trajectories
from .episodes import episode as streams_of
from .test_unbiased import LOG_POLICY, error_of_direction, relative_error


def recipe(**keys):
    return TypeAdapter(CreditRecipe).validate_python({"type": "gae", "whiten": False} | keys)


def test_by_hand():
    rewards, values = [np.array([1.0, 0.0, 4.0])], [np.array([2.0, 3.0, 1.0])]
    # d = 1 + 0.5 * 3 - 2 = 0.5; 0 + 0.5 * 1 - 3 = -2.5; 4 - 1 = 3; then A = d + 0.5 * 0.8 * A_next.
    np.testing.assert_allclose(gae(rewards, values, 0.5, 0.8)[0], [0.5 + 0.4 * -1.3, -2.5 + 0.4 * 3, 3.0])


def test_limits_of_lambda():
    draws = np.random.default_rng(0)
    rewards, values = [draws.normal(size=n) for n in (5, 1, 0)], [draws.normal(size=n) for n in (5, 1, 0)]
    for found, returns, value in zip(
        gae(rewards, values, 0.9, 1.0), reinforce(rewards, discount=0.9), values, strict=True
    ):
        np.testing.assert_allclose(found, returns - value, atol=1e-12)
    for found, reward, value in zip(gae(rewards, values, 0.9, 0.0), rewards, values, strict=True):
        np.testing.assert_allclose(found, reward + 0.9 * np.append(value[1:], 0)[: len(value)] - value, atol=1e-12)


def test_the_critic_may_have_a_separate_lambda():
    draws = np.random.default_rng(1)
    rewards, values = [draws.normal(size=n) for n in (5, 2)], [draws.normal(size=n) for n in (5, 2)]
    coupled, decoupled = recipe(gae_lambda=0.5), recipe(gae_lambda=0.5, critic_lambda=1.0)
    for one, other in zip(coupled.estimate([], rewards, values), decoupled.estimate([], rewards, values), strict=True):
        np.testing.assert_array_equal(one, other)
    for target, returns in zip(decoupled.targets([], rewards, values), reinforce(rewards), strict=True):
        np.testing.assert_allclose(target, returns, atol=1e-12)
    advantages = coupled.estimate([], rewards, values)
    for target, a, v in zip(coupled.targets([], rewards, values), advantages, values, strict=True):
        np.testing.assert_array_equal(target, a + v)


def test_the_lambda_of_a_long_episode_is_larger():
    # 1 - 1 / (alpha n): 40 tokens at 0.05 have 1 - 1 / 2; 20 or fewer have 0.
    assert length_adaptive_lambda(40, 0.05) == pytest.approx(0.5)
    assert length_adaptive_lambda(1000, 0.05) == pytest.approx(0.98)
    assert length_adaptive_lambda(20, 0.05) == 0.0
    assert length_adaptive_lambda(3, 0.05) == 0.0
    assert length_adaptive_lambda(0, 0.05) == 0.0
    draws = np.random.default_rng(2)
    rewards, values = [draws.normal(size=n) for n in (5, 2, 0)], [draws.normal(size=n) for n in (5, 2, 0)]
    found = recipe(length_alpha=0.5).estimate([], rewards, values)
    expected = [gae([r], [v], 1.0, own)[0] for r, v, own in zip(rewards, values, (0.6, 0.0, 0.0), strict=True)]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    with pytest.raises(ValidationError, match="remove `gae_lambda` or `length_alpha`"):
        recipe(length_alpha=0.5, gae_lambda=0.9)


def test_it_runs_over_sampled_tokens_only_and_across_streams():
    short = streams_of(("..ss", {3: 2.0}), (".s", {1: 4.0}))
    long = streams_of(("..s....s", {7: 2.0}), ("......s", {6: 4.0}))
    marks = [[np.array([9, 9, 1, 2]), np.array([9, 3])], [np.array([9, 9, 1, 9, 9, 9, 9, 2]), np.array([9] * 6 + [3])]]
    credit = compute_advantages(
        [short, long], recipe(discount=0.5), reward_streams([short, long]), None, [[m * 1.0 for m in e] for e in marks]
    )
    expected = gae([np.array([0.0, 2.0, 4.0])], [np.array([1.0, 2.0, 3.0])], 0.5, 0.95)[0]
    for played, values in zip((short, long), credit.values, strict=True):
        flat = np.concatenate([v[s.sampled] for v, s in zip(values, played.streams, strict=True)])
        np.testing.assert_allclose(flat, expected, rtol=1e-6)
        assert not any(v[~s.sampled].any() for v, s in zip(values, played.streams, strict=True))


def test_whitening_is_over_the_tokens_of_the_step():
    one, two = streams_of((".sss", {3: 1.0})), streams_of((".s", {1: 5.0}))
    values = [[np.array([0.0, 0.5, 0.25, 0.0])], [np.array([0.0, 1.0])]]
    raw = gae([np.array([0.0, 0.0, 1.0]), np.array([5.0])], [np.array([0.5, 0.25, 0.0]), np.array([1.0])], 1.0, 0.95)
    flat = np.concatenate(raw)
    credit = compute_advantages([one, two], recipe(whiten=True), reward_streams([one, two]), None, values)
    found = np.concatenate([credit.values[0][0][1:], credit.values[1][0][1:]])
    np.testing.assert_allclose(found, (flat - flat.mean()) / (flat.std() + 1e-6), rtol=1e-5)


def test_it_needs_values():
    with pytest.raises(ValueError, match="critic"):
        compute_advantages([streams_of((".s", {1: 1.0}))], recipe(), reward_streams([streams_of((".s", {1: 1.0}))]))


def test_explained_variance():
    returns = np.array([1.0, 2.0, 3.0, 6.0])
    assert explained_variance(returns, returns + 7) == pytest.approx(1.0)
    assert explained_variance(returns, np.zeros(4)) == pytest.approx(0.0)
    assert explained_variance(returns, -returns) == pytest.approx(-3.0)
    assert math.isnan(explained_variance(np.ones(4), np.arange(4.0)))


# -- on two levels ----------------------------------------------------------------------------------------------------


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


def test_two_turns_of_bilevel_gae_by_hand():
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
def test_bilevel_gae_of_one_turn_is_gae(played, discount, decay, other):
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


# -- on the enumerable decision process -------------------------------------------------------------------------------

WRONG = np.array([0.7, -1.0, 0.4, 2.0, -0.6, 1.1])
"""Values of the states with errors."""
Estimate = Callable[[Trajectory], np.ndarray]
"""The advantages [n] of a trajectory's sampled tokens."""


def of_tokens(trajectory: Trajectory, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards, values and turns [n] of the sampled tokens."""
    mask = np.array(trajectory.sampled)
    judged = np.array([values[state] for state, _ in trajectory.choices])
    return np.array(trajectory.rewards)[mask], judged, np.array(trajectory.turn)[mask]


def exact_values() -> np.ndarray:
    """[STATES]: mean of the rewards that still come, given the state before a token."""
    sums, weights = np.zeros(STATES), np.zeros(STATES)
    for t in trajectories():
        rewards = of_tokens(t, sums)[0]
        for place, (state, _) in enumerate(t.choices):
            sums[state] += t.probability(LOG_POLICY) * rewards[place:].sum()
            weights[state] += t.probability(LOG_POLICY)
    return sums / weights


def gradient_of(t: Trajectory, estimate: Estimate) -> np.ndarray:
    """[STATES, 2]: sum of advantage x gradient of the log-probability of the trajectory's tokens."""
    single = [Trajectory((choice,), t.environment, (), (), (), ()) for choice in t.choices]
    return sum(advantage * score(one, LOG_POLICY) for one, advantage in zip(single, estimate(t).tolist(), strict=True))


def error(estimate: Estimate) -> float:
    """Relative error of the expected gradient."""
    return relative_error(sum(t.probability(LOG_POLICY) * gradient_of(t, estimate) for t in trajectories()))


def assigned(values: np.ndarray, chosen) -> Estimate:
    """The advantages of a recipe with the critic's values by state; other positions have NaN."""

    def estimate(t: Trajectory) -> np.ndarray:
        played, mask = episode(t, LOG_POLICY, 0), np.array(t.sampled)
        judged = np.full(len(mask), np.nan)
        judged[mask] = of_tokens(t, values)[1]
        credit = compute_advantages([played], chosen, reward_streams([played]), values=[[judged]]).values[0][0]
        assert not credit[~mask].any()
        return credit[mask]

    return estimate


def bilevel(values: np.ndarray, *numbers: float) -> Estimate:
    def estimate(t: Trajectory) -> np.ndarray:
        return bilevel_gae(*([one] for one in of_tokens(t, values)), *numbers)[0]

    return estimate


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.95, 1.0])
def test_gae_is_unbiased_with_exact_values_for_any_lambda_and_with_any_values_at_1(gae_lambda):
    assert error(assigned(exact_values(), recipe(gae_lambda=gae_lambda))) < 1e-6
    wrong = error(assigned(WRONG, recipe(gae_lambda=gae_lambda)))
    assert wrong < 1e-6 if gae_lambda == 1 else wrong > 0.01


def test_exact_values_lower_the_variance():
    def squares(values: np.ndarray) -> float:
        estimate = assigned(values, recipe(gae_lambda=1.0))
        return sum(t.probability(LOG_POLICY) * float((gradient_of(t, estimate) ** 2).sum()) for t in trajectories())

    assert squares(exact_values()) < 0.8 * squares(np.zeros(STATES))


@pytest.mark.parametrize("decays", [(1.0, 1.0), (0.0, 0.0), (0.5, 1.0), (1.0, 0.5), (0.95, 0.7)])
def test_bilevel_gae_is_unbiased_with_exact_values_for_any_lambda_and_with_any_values_at_1(decays):
    assert error(bilevel(exact_values(), 1, 1, *decays)) < 1e-12
    if decays == (1.0, 1.0):
        assert error(bilevel(WRONG, 1, 1, *decays)) < 1e-12


def published_turns(t: Trajectory) -> np.ndarray:
    """The published turn level, which is biased even with exact values."""
    return published(*of_tokens(t, exact_values()), 1.0, 1.0, 0.5)


@pytest.mark.parametrize(
    "estimate",
    [
        bilevel(WRONG, 1, 1, 0.5, 0.5),
        bilevel(exact_values(), 1, 0.8, 1, 1),
        bilevel(exact_values(), 0.8, 1, 1, 1),
        published_turns,
    ],
    ids=["errors of values where traces decay", "a discount of turns", "a discount of tokens", "published"],
)
def test_bilevel_gae_is_biased_by(estimate):
    assert error_of_direction(sum(t.probability(LOG_POLICY) * gradient_of(t, estimate) for t in trajectories())) > 0.01


def test_assign_passes_values_of_sampled_tokens_and_their_turns():
    chosen = TypeAdapter(CreditRecipe).validate_python({"type": "bilevel_gae", "whiten": False})
    for t in trajectories():
        expected = bilevel(WRONG, 1.0, 0.95, 0.95, 0.95)(t)
        np.testing.assert_allclose(assigned(WRONG, chosen)(t), expected, rtol=1e-5, atol=1e-6)
