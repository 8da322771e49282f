"""Unit credit against the exact policy gradient of the process whose episodes are all enumerated.

The reward model of these tests knows nothing: what it says of any beginning of an episode, or of one with units left
out, is a number made from the token ids, and only the whole episode is worth its return. So credit that is unbiased here
is unbiased for any values of unfinished answers. Numbers are multiples of 1/8, which float32 holds exactly.
"""

import math
from functools import cache

import numpy as np
import pytest
from pydantic import TypeAdapter

from posttrain.credit.assign import compute_advantages
from posttrain.credit.units.estimators import loo, prefix
from posttrain.credit.units.mixing import UnitAdvantages, UnitRewards, with_unit_advantages, with_unit_rewards
from posttrain.credit.units.spans import Spans
from posttrain.episode import Advantages, RewardStreams
from posttrain.recipe.credit import CreditRecipe
from posttrain.seeds import derive_seed
from tests.credit.decision_process import STATES, Trajectory, episode, joint_samples
from tests.credit.test_unbiased import LOG_POLICY, error_of_direction, relative_error
from tests.credit.units.test_estimators import beginnings, lacking

EMPTY = 0.75
"""What an empty answer is worth, where it is worth something."""
BETAS = [0.0, 0.5, 1.0]
BY_RETURN = [{"type": "arpo"}, {"type": "rloo"}, {"type": "dr_grpo"}]
"""Credit by the whole return of an episode."""
FROM_TOKEN_ON = [{"type": "reinforce"}, {"type": "gae", "gae_lambda": 1.0, "whiten": False}]
"""Credit by what is paid from a token on, the second over values that are wrong."""
WRONG = np.array([0.75, -1.0, 0.5, 2.0, -0.25, 1.125])


def opinion(*ids: int) -> float:
    return derive_seed("opinion", *ids) % 33 / 8 - 2


# -- units of a trajectory -----------------------------------------------------------------------------------------------


def ends(t: Trajectory, kind: str) -> list[int]:
    """Places of the last tokens of units: of all sampled tokens, or of the turns."""
    places = [place for place, sampled in enumerate(t.sampled) if sampled]
    if kind == "token":
        return places
    return [place for place in places if place + 1 == len(t.ids) or not t.sampled[place + 1]]


def cut(t: Trajectory, kind: str, found: bool = True) -> Spans:
    counts = np.cumsum(t.sampled)[ends(t, kind)]
    return Spans(np.array([0, *counts]), np.full(len(counts), found))


def values(t: Trajectory, kind: str, empty: float) -> np.ndarray:
    """[K + 1]: of the beginnings of an episode; what the environment showed is part of them."""
    return np.array([empty, *(opinion(*t.ids[: end + 1]) for end in ends(t, kind)[:-1]), t.total])


def coalition_values(t: Trajectory, kind: str) -> dict[int, float]:
    """Of the episode with units left out; what the environment showed stays."""
    unit = cut(t, kind).unit_of_token.tolist()
    places = dict(zip([place for place, sampled in enumerate(t.sampled) if sampled], unit, strict=True))
    found = {}
    for members in range(1 << len(ends(t, kind))):
        kept = [token for place, token in enumerate(t.ids) if place not in places or members >> places[place] & 1]
        found[members] = opinion(*kept)
    return found | {0: EMPTY, (1 << len(ends(t, kind))) - 1: t.total}


def by_loo(t: Trajectory, kind: str) -> np.ndarray:
    return loo(t.total, lacking(coalition_values(t, kind), len(ends(t, kind))))


def by_prefix(t: Trajectory, kind: str) -> np.ndarray:
    return prefix(values(t, kind, EMPTY))


def trunc(values: np.ndarray) -> np.ndarray:
    """R - Phi_(k-1), the published difference: an unbiased advantage. As a reward it counts unit j j times."""
    return values[-1] - values[:-1]


def by_trunc(t: Trajectory, kind: str) -> np.ndarray:
    return trunc(values(t, kind, EMPTY))


# -- expectations --------------------------------------------------------------------------------------------------------


@cache
def groups(size):
    return [
        (chosen, probability, [episode(t, LOG_POLICY, index) for index, t in enumerate(chosen)])
        for chosen, probability in joint_samples(size, LOG_POLICY)
    ]


def gradient(size, credit_of) -> np.ndarray:
    """[STATES, 2]: what `credit_of(trajectories, episodes)`, an `Advantages`, moves the logits by on average."""
    total = np.zeros((STATES, 2))
    for chosen, probability, played in groups(size):
        for t, streams in zip(chosen, credit_of(chosen, played).values, strict=True):
            for (state, token), advantage in zip(t.choices, streams[0][np.array(t.sampled)].tolist(), strict=True):
                total[state] -= probability / size * advantage * np.exp(LOG_POLICY[state])
                total[state, token] += probability / size * advantage
    return total


def outcomes(chosen) -> RewardStreams:
    """The whole return on the last sampled token, as from a reward model."""
    return RewardStreams([[np.array([0.0] * (len(t.ids) - 1) + [t.total], np.float32)] for t in chosen])


def assigned(credit: dict, chosen, played, rewards: RewardStreams) -> Advantages:
    recipe = TypeAdapter(CreditRecipe).validate_python(credit)
    judged = []
    for t in chosen:
        own = np.zeros(len(t.ids))
        own[np.array(t.sampled)] = [WRONG[state] for state, _ in t.choices]
        judged.append([own])
    return compute_advantages(played, recipe, rewards, None, judged)


def paid(credit, units_of, beta, size, placement="end") -> np.ndarray:
    """The gradient of unit credit in the reward channel; `units_of` a trajectory."""

    def credit_of(chosen, played):
        rewards = with_unit_rewards(played, outcomes(chosen), [units_of(t) for t in chosen], beta, placement)
        return assigned(credit, chosen, played, rewards)

    return gradient(size, credit_of)


def judged(estimate, kind, beta, size, standardized=False, outcome=BY_RETURN[0]) -> np.ndarray:
    """The gradient of unit credit in the advantage channel, raw unless `standardized`."""

    def credit_of(chosen, played):
        whole_credit = assigned(outcome, chosen, played, outcomes(chosen))
        if standardized:
            units = [UnitAdvantages(cut(t, kind), estimate(t, kind), t.total, EMPTY) for t in chosen]
            return with_unit_advantages(played, whole_credit, units, beta)
        mixed = []
        for t, streams in zip(chosen, whole_credit.values, strict=True):
            own = (1 - beta) * streams[0].astype(np.float64)
            own[np.array(t.sampled)] += beta * estimate(t, kind)[cut(t, kind).unit_of_token]
            mixed.append([own])
        return Advantages(mixed)

    return gradient(size, credit_of)


def prefix_rewards(kind, empty=EMPTY, found=lambda t: True):
    return lambda t: UnitRewards(cut(t, kind, found(t)), prefix(values(t, kind, empty)), t.total, empty)


def test_the_reward_model_of_these_tests_is_uninformative():
    several = [t for (t,), _, _ in groups(1) if len(t.choices) > 2]
    assert len(several) > 5
    assert {len(ends(t, "turn")) for t in several} == {2}
    spread = [np.abs(np.diff(values(t, "token", EMPTY))).min() for t in several]
    assert max(spread) > 0.5
    assert len({round(8 * v) for t in several for v in coalition_values(t, "token").values()}) > 20


# -- rewards -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["token", "turn"])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("credit", [*BY_RETURN, *FROM_TOKEN_ON], ids=str)
def test_prefix_rewards_are_unbiased(credit, beta, kind):
    # For R - beta Phi_0, and so for R, since what an empty answer is worth does not depend on the policy.
    size, scale = {"rloo": (2, 1.0), "dr_grpo": (2, 0.5)}.get(credit["type"], (1, 1.0))
    assert relative_error(paid(credit, prefix_rewards(kind), beta, size), scale) < 1e-9


def test_even_placement_is_biased_except_with_credit_by_the_whole_return():
    assert relative_error(paid({"type": "rloo"}, prefix_rewards("turn"), 1.0, 2, "even")) < 1e-6
    assert error_of_direction(paid({"type": "reinforce"}, prefix_rewards("turn"), 1.0, 1, "even")) > 0.01


@pytest.mark.parametrize("credit", [BY_RETURN[0], FROM_TOKEN_ON[0]], ids=str)
@pytest.mark.parametrize("kind", ["token", "turn"])
def test_truncation_as_a_reward_is_biased(kind, credit):
    def published(t):
        return UnitRewards(cut(t, kind), by_trunc(t, kind), t.total, EMPTY)

    assert error_of_direction(paid(credit, published, 0.8, 1, "even")) > 0.01
    assert error_of_direction(paid(credit, published, 1.0, 1)) > 0.01


@pytest.mark.parametrize("credit", [BY_RETURN[0], FROM_TOKEN_ON[0]], ids=str)
def test_leave_one_out_as_a_reward_is_biased(credit):
    found = paid(credit, lambda t: UnitRewards(cut(t, "token"), by_loo(t, "token"), t.total, EMPTY), 1.0, 1)
    assert error_of_direction(found) > 0.01


@pytest.mark.parametrize("empty", [0.0, EMPTY])
def test_a_segmenter_that_depends_on_later_text_is_unbiased_only_with_whole_returns(empty):
    def some(t):
        return len(t.choices) > 2

    by_return, from_token_on = {"type": "arpo"}, {"type": "reinforce"}
    assert relative_error(paid(by_return, prefix_rewards("token", empty, some), 1.0, 1)) < 1e-9
    # What is subtracted from a token's return yet depends on what comes after it, if that decides what is found.
    assert error_of_direction(paid(from_token_on, prefix_rewards("token", empty, some), 1.0, 1)) > 0.01


# -- advantages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", BY_RETURN[:2], ids=str)
@pytest.mark.parametrize("kind", ["token", "turn"])
@pytest.mark.parametrize("beta", BETAS)
def test_truncation_is_an_unbiased_advantage(beta, kind, outcome):
    assert relative_error(judged(by_trunc, kind, beta, 2 if outcome["type"] == "rloo" else 1, False, outcome)) < 1e-9


@pytest.mark.parametrize("kind", ["token", "turn"])
@pytest.mark.parametrize("estimate", [by_loo, by_prefix])
def test_other_credit_is_a_biased_advantage_where_units_depend_on_those_before(estimate, kind):
    # The answer without a unit holds later units, which the unit had a part in; a share of the outcome is no return.
    assert error_of_direction(judged(estimate, kind, 1.0, 1)) > 0.01
    assert error_of_direction(judged(estimate, kind, 0.5, 1)) > 0.01


def test_standardising_by_the_batch_itself_is_biased():
    assert error_of_direction(judged(by_trunc, "token", 1.0, 2, True)) > 0.01


def test_standardising_by_constants_is_a_factor():
    found = judged(lambda t, kind: (by_trunc(t, kind) - 0.375) / 2, "token", 1.0, 1)
    assert relative_error(found, 0.5) < 1e-9


# -- units that do not depend on each other ------------------------------------------------------------------------------

CHANCES = np.array([0.3, 0.6, 0.45])
"""A second process: three units, each one of two tokens, drawn with these chances whatever stood before."""


def answers():
    for members in range(8):
        bits = np.array([members >> unit & 1 for unit in range(3)])
        yield bits, math.prod(np.where(bits == 1, CHANCES, 1 - CHANCES))


def worth(bits, kept: int, additive: bool) -> float:
    """Of the units in the coalition `kept`."""
    names = [3 * unit + int(bits[unit]) for unit in range(3) if kept >> unit & 1]
    return sum(map(opinion, names)) if additive else opinion(100, *names)


def of_independent_units(credit, additive=False) -> np.ndarray:
    """[3]: the gradient by the units' log odds, for `credit` (value of each coalition) -> [3]."""
    total = np.zeros(3)
    for bits, chance in answers():
        known = {kept: worth(bits, kept, additive) for kept in range(8)}
        total += chance * credit(known) * (bits - CHANCES)
    return total


def credits(known) -> dict[str, np.ndarray]:
    along, without = beginnings(known, 3), lacking(known, 3)
    return {
        "return": np.full(3, known[7]),
        "trunc": trunc(along),
        "loo": loo(known[7], without),
        "prefix": prefix(along),
    }


@pytest.mark.parametrize("additive", [False, True])
def test_leave_one_out_is_unbiased_for_independent_units_and_prefix_for_additive_values(additive):
    exact = of_independent_units(lambda known: credits(known)["return"], additive)
    assert np.abs(exact).min() > 0.01
    for name in ("trunc", "loo", "prefix"):
        found = of_independent_units(lambda known, name=name: credits(known)[name], additive)
        if additive or name in ("trunc", "loo"):
            np.testing.assert_allclose(found, exact, atol=1e-12)
        else:
            sine = 1 - (found @ exact / np.linalg.norm(found) / np.linalg.norm(exact)) ** 2
            assert math.sqrt(sine) > 0.01
