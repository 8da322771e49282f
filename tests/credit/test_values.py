"""GAE by hand, its limits, the tokens it runs over, and its bias on the process whose episodes are all enumerated."""

import math

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from posttrain.credit.assign import compute_advantages, reward_streams
from posttrain.credit.returns import explained_variance, gae, length_adaptive_lambda, reinforce
from posttrain.recipe.credit import CreditRecipe

from .decision_process import PARAMETERS, STATES, episode, exact_gradient, log_softmax, trajectories
from .test_assign import episode as streams_of

LOG_POLICY = log_softmax(PARAMETERS)
EXACT = exact_gradient(PARAMETERS)


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


# -- on the enumerable decision process -------------------------------------------------------------------------------


def exact_values() -> np.ndarray:
    """[STATES]: mean of the rewards that still come, given the state before a token."""
    sums, weights = np.zeros(STATES), np.zeros(STATES)
    for t in trajectories():
        probability = t.probability(LOG_POLICY)
        rewards = np.array(t.rewards)[np.array(t.sampled)]
        for place, (state, _) in enumerate(t.choices):
            sums[state] += probability * rewards[place:].sum()
            weights[state] += probability
    return sums / weights


def expected_gradient(values: np.ndarray, gae_lambda: float) -> np.ndarray:
    """[STATES, 2]: mean over all episodes of sum A_t grad log pi, with the critic's values by state."""
    total = np.zeros_like(PARAMETERS)
    for t in trajectories():
        played = episode(t, LOG_POLICY, 0)
        sampled = played.streams[0].sampled
        judged = np.zeros(len(sampled))
        judged[sampled] = [values[state] for state, _ in t.choices]
        credit = compute_advantages([played], recipe(gae_lambda=gae_lambda), reward_streams([played]), None, [[judged]])
        for (state, token), advantage in zip(t.choices, credit.values[0][0][sampled], strict=True):
            gradient = -np.exp(LOG_POLICY[state])
            gradient[token] += 1.0
            total[state] += t.probability(LOG_POLICY) * float(advantage) * gradient
    return total


WRONG = np.array([0.7, -1.0, 0.4, 2.0, -0.6, 1.1])


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.95, 1.0])
def test_exact_values_make_it_unbiased_for_any_lambda(gae_lambda):
    assert np.abs(expected_gradient(exact_values(), gae_lambda) - EXACT).max() < 1e-6 * np.abs(EXACT).max()


def test_at_lambda_one_it_is_unbiased_for_any_values():
    assert np.abs(expected_gradient(WRONG, 1.0) - EXACT).max() < 1e-6 * np.abs(EXACT).max()


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.95])
def test_wrong_values_bias_it_below(gae_lambda):
    assert np.abs(expected_gradient(WRONG, gae_lambda) - EXACT).max() > 0.01 * np.abs(EXACT).max()


def test_exact_values_lower_the_variance():
    def squares(values: np.ndarray) -> float:
        total = 0.0
        for t in trajectories():
            played = episode(t, LOG_POLICY, 0)
            sampled = played.streams[0].sampled
            judged = np.zeros(len(sampled))
            judged[sampled] = [values[state] for state, _ in t.choices]
            credit = compute_advantages([played], recipe(gae_lambda=1.0), reward_streams([played]), None, [[judged]])
            gradient = np.zeros_like(PARAMETERS)
            for (state, token), advantage in zip(t.choices, credit.values[0][0][sampled], strict=True):
                gradient[state] -= float(advantage) * np.exp(LOG_POLICY[state])
                gradient[state, token] += float(advantage)
            total += t.probability(LOG_POLICY) * float((gradient**2).sum())
        return total

    assert squares(exact_values()) < 0.8 * squares(np.zeros(STATES))
