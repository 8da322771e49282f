"""Turn-level credit against the exact policy gradient of the process whose episodes are all enumerated.

Its second turn is played in one of two states, and one episode in a few ends after the first turn, by the policy's own
choice in part: what the estimators assume of turns and states is not granted.
"""

from collections.abc import Callable

import numpy as np
import pytest
from pydantic import TypeAdapter

from posttrain.credit.assign import compute_advantages, reward_streams
from posttrain.credit.critic import bilevel_gae
from posttrain.recipe.credit import CreditRecipe
from tests.credit.decision_process import PARAMETERS, STATES, Trajectory, episode, score, trajectories
from tests.credit.test_unbiased import LOG_POLICY, error_of_direction, expected_gradient, relative_error

from .test_bilevel_gae import published

REINFORCE = {"type": "reinforce"}
WRONG = np.array([0.7, -1.0, 0.4, 2.0, -0.6, 1.1])


def test_the_process_has_episodes_of_one_and_of_two_turns():
    assert {max(t.turn) for t in trajectories()} == {0, 1}
    assert all((np.array(t.turn) >= 0).tolist() == list(t.sampled) for t in trajectories())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("loss", [REINFORCE, {"type": "ppo"}, {"type": "gspo_token"}, {"type": "cispo"}], ids=str)
@pytest.mark.parametrize("baseline", ["none", "others"])
def test_returns_from_each_turn_on_are_unbiased(baseline, loss, size):
    found = expected_gradient({"type": "turn_returns", "baseline": baseline}, loss, size)
    assert relative_error(found) < 1e-9


def test_a_discount_per_turn_is_biased():
    credit = {"type": "turn_returns", "baseline": "none", "discount": 0.8}
    assert error_of_direction(expected_gradient(credit, REINFORCE, 2)) > 0.01


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "credit",
    [
        {"type": "mt_grpo"},
        {"type": "gigpo"},
        {"type": "gigpo", "divide_by_std": False},
        {"type": "gigpo", "divide_by_std": False, "discount": 1.0},
    ],
    ids=str,
)
def test_biased_ones_miss_the_direction(credit, size):
    assert error_of_direction(expected_gradient(credit, REINFORCE, size)) > 0.01


@pytest.mark.parametrize("size", [2, 3])
def test_gigpo_without_its_second_level_and_divisor_is_dr_grpo(size):
    credit = {"type": "gigpo", "divide_by_std": False, "step_weight": 0.0}
    assert relative_error(expected_gradient(credit, REINFORCE, size), (size - 1) / size) < 1e-7


# -- over values ------------------------------------------------------------------------------------------------------

Estimator = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(rewards [n], values [n], turns [n]) of an episode's sampled tokens -> advantages [n]."""


def of_tokens(trajectory: Trajectory, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    mask = np.array(trajectory.sampled)
    judged = np.array([values[state] for state, _ in trajectory.choices])
    return np.array(trajectory.rewards)[mask], judged, np.array(trajectory.turn)[mask]


def exact_values() -> np.ndarray:
    """[STATES]: mean of the rewards that are still to come in the state."""
    reached, earned = np.zeros(STATES), np.zeros(STATES)
    for t in trajectories():
        rewards = of_tokens(t, np.zeros(STATES))[0]
        for place, (state, _) in enumerate(t.choices):
            reached[state] += t.probability(LOG_POLICY)
            earned[state] += t.probability(LOG_POLICY) * rewards[place:].sum()
    return earned / reached


def gradient_over_values(values: np.ndarray, estimate: Estimator) -> np.ndarray:
    total = np.zeros_like(PARAMETERS)
    for t in trajectories():
        for choice, advantage in zip(t.choices, estimate(*of_tokens(t, values)), strict=True):
            alone = Trajectory((choice,), t.environment, (), (), (), ())
            total += t.probability(LOG_POLICY) * advantage * score(alone, LOG_POLICY)
    return total


def bilevel(*numbers: float) -> Estimator:
    return lambda rewards, values, turns: bilevel_gae([rewards], [values], [turns], *numbers)[0]


def test_without_discount_and_lambda_any_values_are_unbiased():
    assert relative_error(gradient_over_values(WRONG, bilevel(1, 1, 1, 1))) < 1e-12


@pytest.mark.parametrize("decays", [(0.0, 0.0), (0.5, 1.0), (1.0, 0.5), (0.95, 0.7)])
def test_with_exact_values_any_lambda_is_unbiased(decays):
    assert relative_error(gradient_over_values(exact_values(), bilevel(1, 1, *decays))) < 1e-12


def test_errors_of_values_bias_it_where_traces_decay():
    assert error_of_direction(gradient_over_values(WRONG, bilevel(1, 1, 0.5, 0.5))) > 0.01


def test_discounts_bias_it():
    assert error_of_direction(gradient_over_values(exact_values(), bilevel(1, 0.8, 1, 1))) > 0.01
    assert error_of_direction(gradient_over_values(exact_values(), bilevel(0.8, 1, 1, 1))) > 0.01


def test_the_published_turn_level_is_biased_even_with_exact_values():
    def as_published(rewards: np.ndarray, values: np.ndarray, turns: np.ndarray) -> np.ndarray:
        return published(rewards, values, turns, 1.0, 1.0, 0.5)

    assert error_of_direction(gradient_over_values(exact_values(), as_published)) > 0.01


def test_assign_passes_values_of_sampled_tokens_and_their_turns():
    recipe = TypeAdapter(CreditRecipe).validate_python({"type": "bilevel_gae", "whiten": False})
    for t in trajectories():
        played, mask = episode(t, LOG_POLICY, 0), np.array(t.sampled)
        values = np.full(len(mask), np.nan)
        values[mask] = of_tokens(t, WRONG)[1]
        credit = compute_advantages([played], recipe, reward_streams([played]), values=[[values]]).values[0][0]
        expected = bilevel(1.0, 0.95, 0.95, 0.95)(*of_tokens(t, WRONG))
        np.testing.assert_allclose(credit[mask], expected, rtol=1e-5, atol=1e-6)
        assert not credit[~mask].any()
