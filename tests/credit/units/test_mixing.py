"""Unit credit joins that of outcomes: placement, identities of the two channels, and the law that keeps them apart."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.credit.assign import compute_advantages, reward_streams
from posttrain.credit.units.estimators import prefix
from posttrain.credit.units.mixing import (
    CreditedUnits,
    UnitAdvantages,
    UnitRewards,
    distribute,
    with_unit_advantages,
    with_unit_rewards,
)
from posttrain.credit.units.spans import Spans
from posttrain.episode import Advantages, RewardStreams
from posttrain.seeds import random_stream
from tests.credit.episodes import episode, recipe

BETAS = [0.0, 0.25, 0.5, 1.0]
CREDITS = ["grpo", "rloo", "reinforce", "reinforce_pp", "turn_returns"]
seeds = st.integers(0, 10_000)


def played(seed, units, group=0, index=0, found=True):
    """An episode of two streams and two turns, with 0.25 of other reward on each sampled token and the outcome on the
    last one, and the values [K + 1] of its beginnings."""
    draws = random_stream(seed, "episode", index)
    tokens = units + int(draws.integers(0, 4)) if units else 0
    masks = "." + "s" * tokens
    for place in sorted(draws.integers(0, len(masks), size=2).tolist(), reverse=True):
        masks = masks[:place] + ".." + masks[place:]
    middle = int(draws.integers(0, len(masks) + 1))
    values = np.round(draws.normal(size=units + 1), 2)
    parts = [part for part in (masks[:middle], masks[middle:]) if part]
    paid = [{place: 0.25 for place, mark in enumerate(part) if mark == "s"} for part in parts]
    if tokens:
        where = max(number for number, own in enumerate(paid) if own)
        paid[where][max(paid[where])] += values[-1]
    one = episode(*zip(parts, paid, strict=True), group=group, index=index)
    inner = draws.permutation(np.arange(1, tokens))[: max(units - 1, 0)] if tokens else np.zeros(0)
    return one, Spans.from_cuts(tokens, inner, found), values


def trunc(values):
    """R - Phi_(k-1): the published difference, which is an advantage."""
    return values[-1] - values[:-1]


def rewarded(one, cuts, values):
    return UnitRewards(cuts, prefix(values) if len(cuts) else np.zeros(0), float(values[-1]), float(values[0]))


def judged(one, cuts, values):
    return UnitAdvantages(cuts, trunc(values) if len(cuts) else np.zeros(0), float(values[-1]), float(values[0]))


def of_tokens(one, streams):
    return np.concatenate([np.zeros(0), *(own[s.sampled] for own, s in zip(streams, one.streams, strict=True))])


def same_bits(one, other):
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


# -- units and their placement -------------------------------------------------------------------------------------------


@given(st.integers(0, 5), seeds)
@settings(max_examples=30, deadline=None)
def test_a_units_tokens_sum_to_its_credit(units, seed):
    _, cuts, values = played(seed, units)
    for placement in ("end", "even"):
        found = distribute(cuts, prefix(values), placement)
        assert found.shape == (cuts.tokens,)
        sums = [found[start:stop].sum() for start, stop in cuts]
        np.testing.assert_allclose(sums, prefix(values), atol=1e-12)


def test_placement_by_hand():
    """Every token of a unit gets its whole credit in its return only if the credit is at the end."""
    cuts, credits = Spans.from_cuts(6, np.array([1, 3])), np.array([1.0, 4.0, -3.0])
    for placement, placed, ahead in (
        ("end", [1, 0, 4, 0, 0, -3], [2, 1, 1, -3, -3, -3]),
        ("even", [1, 2, 2, -1, -1, -1], [2, 1, -1, -3, -2, -1]),
    ):
        found = distribute(cuts, credits, placement)
        np.testing.assert_array_equal(found, placed)
        np.testing.assert_array_equal(np.cumsum(found[::-1])[::-1], ahead)


def test_residual():
    cuts = Spans.from_cuts(3, np.array([1, 2]))
    values = np.array([0.5, 2.0, 1.0, 4.0])
    assert UnitRewards(cuts, prefix(values), 4.0, 0.5).residual == 0
    assert UnitAdvantages(cuts, trunc(values), 4.0, 0.5).residual == 3.5 - 8.5


def test_credit_of_other_shapes_or_nonfinite_values_is_refused():
    cuts = Spans.from_cuts(3, np.array([1]))
    with pytest.raises(ValueError, match="3 credits for 2 units"):
        UnitRewards(cuts, np.zeros(3), 0.0, 0.0)
    for credits, outcome, empty in [([0, np.nan], 0, 0), ([0, 0], np.inf, 0), ([0, 0], 0, np.nan)]:
        with pytest.raises(ValueError, match="finite"):
            UnitAdvantages(cuts, np.array(credits), outcome, empty)
    one = episode((".ss", {2: 1.0}))
    with pytest.raises(ValueError, match="units over 3 tokens for an episode that sampled 2"):
        with_unit_rewards([one], reward_streams([one]), [UnitRewards(cuts, np.zeros(2), 1.0, 0.0)], 0.5, "end")


# -- reward streams ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["end", "even"])
@given(units=st.integers(1, 5), seed=seeds, beta=st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_an_episode_earns_its_outcome_minus_beta_times_the_empty_answer(placement, units, seed, beta):
    one, cuts, values = played(seed, units)
    before = reward_streams([one])
    after = with_unit_rewards([one], before, [rewarded(one, cuts, values)], beta, placement)
    assert isinstance(after, RewardStreams)
    assert same_bits(before.values[0], reward_streams([one]).values[0])
    other = 0.25 * cuts.tokens
    assert of_tokens(one, before.values[0]).sum() == pytest.approx(values[-1] + other, abs=1e-5)
    assert of_tokens(one, after.values[0]).sum() == pytest.approx(values[-1] - beta * values[0] + other, abs=1e-5)
    for own, stream in zip(after.values[0], one.streams, strict=True):
        assert own.dtype == np.float32
        assert own.shape == stream.sampled.shape
        assert not own[~stream.sampled].any()


def test_rewards_by_hand_over_streams_and_turns():
    # Six sampled tokens in units of 2, 3 (which crosses into the second stream) and 1; the outcome is 4.
    one = episode((".ss.s", {2: 0.5}), ("..ss.s", {5: 4.0}))
    cuts = Spans(np.array([0, 2, 5, 6]), np.array([False, True, True]))
    units = [UnitRewards(cuts, np.array([1.0, -2.0, 4.0]), 4.0, 1.0)]
    ends = with_unit_rewards([one], reward_streams([one]), units, 0.5, "end").values[0]
    np.testing.assert_array_equal(ends[0], [0, 0, 1.0, 0, 0])
    np.testing.assert_array_equal(ends[1], [0, 0, 0, -1, 0, 4.0])
    evens = with_unit_rewards([one], reward_streams([one]), units, 0.75, "even").values[0]
    np.testing.assert_array_equal(evens[0], [0, 0.375, 0.875, 0, -0.5])
    np.testing.assert_array_equal(evens[1], [0, 0, -0.5, -0.5, 0, 4.0])


def test_the_published_drca_by_hand():
    # Truncation paid as a reward: beta D_k / |U_k| on the unit's tokens and (1 - beta) R on the last, which sees both.
    one = episode((".ssss", {4: 2.8}))
    values = np.array([0.0, 1.0, 2.8])
    units = [UnitRewards(Spans.from_cuts(4, np.array([2])), trunc(values), 2.8, 0.0)]
    found = with_unit_rewards([one], reward_streams([one]), units, 0.8, "even").values[0][0]
    np.testing.assert_allclose(found, [0, 0.4 * 2.8, 0.4 * 2.8, 0.4 * 1.8, 0.4 * 1.8 + 0.2 * 2.8], rtol=1e-6)


# -- advantages ----------------------------------------------------------------------------------------------------------


def in_groups():
    """Two groups of one stream each: credits 0, 2 | 4, 6 with scores by batch and by group known."""
    made = [episode((".ss.", {}), group=g, index=i) for g, i in ((0, 0), (0, 1), (1, 0), (1, 1))]
    credits = [[0.0, 2.0], [2.0, 0.0], [4.0, 6.0], [6.0, 4.0]]
    units = [UnitAdvantages(Spans.from_cuts(2, np.array([1])), np.array(own), 1.0, 0.0) for own in credits]
    return made, Advantages([[np.array([0, 2, 2, 0], np.float32)] for _ in made]), units


def test_standardised_over_the_batch():
    made, outcome, units = in_groups()
    found = with_unit_advantages(made, outcome, units, 0.5).values
    std = np.sqrt(5) + 1e-6
    for own, unit in zip(found, units, strict=True):
        assert own[0].dtype == np.float32
        np.testing.assert_allclose(own[0], [0, *(1 + 0.5 * (unit.credits - 3) / std), 0], rtol=1e-6)


def test_each_unit_counts_once_for_any_length():
    one = episode((".sssss", {}))
    units = [UnitAdvantages(Spans.from_cuts(5, np.array([4])), np.array([1.0, 3.0]), 1.0, 0.0)]
    found = with_unit_advantages([one], reward_streams_of_zero([one]), units, 1.0).values[0][0]
    np.testing.assert_allclose(found, [0, -1, -1, -1, -1, 1], atol=2e-6)


@pytest.mark.parametrize("beta", BETAS[1:])
@pytest.mark.parametrize("where", ["before", "between", "after", "everywhere"])
def test_spans_outside_units_have_no_part_in_hindsight_credit(where, beta):
    """The tokens of units get what they get without the other spans, whose credits may be anything."""
    made, outcome, units = in_groups()
    plain = with_unit_advantages(made, outcome, units, beta).values
    flags = {
        "before": [False, True, True],
        "between": [True, False, True],
        "after": [True, True, False],
        "everywhere": [False, True, False, True, False],
    }[where]
    is_unit = np.repeat(flags, 2)  # spans of two tokens
    longer = [episode(("." + "s" * len(is_unit) + ".", {}), group=own.group, index=own.index) for own in made]
    wider = []
    for number, unit in enumerate(units):
        credits = np.full(len(flags), 100.0 * number - 50)
        credits[flags] = unit.credits
        spans = Spans(2 * np.arange(len(flags) + 1), np.array(flags))
        wider.append(UnitAdvantages(spans, credits, unit.outcome, unit.empty_value))
    twos = Advantages([[np.array([0, *[2.0] * len(is_unit), 0], np.float32)] for _ in made])
    found = with_unit_advantages(longer, twos, wider, beta).values
    for one, other in zip(found, plain, strict=True):
        tokens = one[0][1:-1]
        np.testing.assert_array_equal(tokens[is_unit], np.repeat(other[0][1:-1], 2))
        np.testing.assert_array_equal(tokens[~is_unit], np.float32((1 - beta) * 2))


def test_an_episode_with_units_has_a_baseline_in_a_group_of_one():
    units = in_groups()[2]
    alone = [episode((".ss.", {}), group=g) for g in range(3)]
    outcome = compute_advantages(alone, recipe("grpo"), reward_streams(alone))
    assert outcome.without_baseline == {0, 1, 2}
    mixed = with_unit_advantages(alone, outcome, [units[0], None, units[1]], 0.5)
    assert mixed.without_baseline == {1}
    assert with_unit_advantages(alone, outcome, units[:3], 0.0).without_baseline == {0, 1, 2}


def reward_streams_of_zero(episodes):
    return Advantages([[np.zeros(len(stream), np.float32) for stream in one.streams] for one in episodes])


def test_scores_are_clipped_before_they_are_weighed(monkeypatch):
    one = episode(("s" * 20, {}))
    units = [UnitAdvantages(Spans.from_cuts(20, np.arange(20)), np.array([*[0.0] * 19, 100.0]), 1.0, 0.0)]
    raw = np.sqrt(19)
    for clip in (5.0, 2.0):
        monkeypatch.setattr("posttrain.credit.units.mixing.CLIP", clip)
        found = with_unit_advantages([one], reward_streams_of_zero([one]), units, 0.5).values[0][0]
        np.testing.assert_allclose(found[-1], 0.5 * min(raw, clip), rtol=1e-5)
        np.testing.assert_allclose(found[:-1], -0.5 / raw, rtol=1e-5)


def test_equal_credits_give_exactly_zero_and_a_batch_without_units_is_unchanged():
    made, outcome, units = in_groups()
    alike = [UnitAdvantages(own.spans, np.full(2, 0.1), 1.0, 0.0) for own in units]
    for own in with_unit_advantages(made, outcome, alike, 0.5).values:
        np.testing.assert_array_equal(own[0], [0, 1, 1, 0])
    none = [UnitAdvantages(Spans.from_cuts(2, np.zeros(0), is_unit=False), np.ones(1), 1.0, 0.0) for _ in made]
    unchanged = with_unit_advantages(made, outcome, none, 0.5).values
    assert all(same_bits(own, before) for own, before in zip(unchanged, outcome.values, strict=True))


def test_the_order_of_episodes_changes_no_bit():
    cases = [played(seed, 1 + seed % 5, group=seed % 3, index=seed) for seed in range(12)]
    units = [judged(*case) for case in cases]
    made = [case[0] for case in cases]
    outcome = compute_advantages(made, recipe("rloo"), reward_streams(made))
    straight = with_unit_advantages(made, outcome, units, 0.7).values
    order = random_stream(0, "order").permutation(len(made)).tolist()
    shuffled = Advantages([outcome.values[place] for place in order])
    mixed = with_unit_advantages([made[p] for p in order], shuffled, [units[p] for p in order], 0.7).values
    assert all(same_bits(straight[place], own) for place, own in zip(order, mixed, strict=True))


# -- both channels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CREDITS)
def test_beta_0_is_the_credit_of_outcomes_to_the_bit(kind):
    cases = [played(seed, 1 + seed % 4, group=seed // 2, index=seed % 2) for seed in range(6)]
    made = [case[0] for case in cases]
    plain = compute_advantages(made, recipe(kind), reward_streams(made))
    rewards = with_unit_rewards(made, reward_streams(made), [rewarded(*case) for case in cases], 0.0, "end")
    paid = compute_advantages(made, recipe(kind), rewards)
    scored = with_unit_advantages(made, plain, [judged(*case) for case in cases], 0.0)
    for a, b, c in zip(plain.values, paid.values, scored.values, strict=True):
        assert same_bits(a, b)
        assert same_bits(a, c)
    other = with_unit_rewards(made, reward_streams(made), [rewarded(*case) for case in cases], 0.5, "end")
    assert not all(same_bits(a, b) for a, b in zip(rewards.values, other.values, strict=True))


@pytest.mark.parametrize("beta", BETAS[1:])
def test_episodes_without_units_get_outcome_credit_in_a_batch_with_units(beta):
    cases = [played(0, 3), played(1, 3, found=False), played(2, 0), played(3, 2), played(4, 2)]
    made = [case[0] for case in cases]
    kept = [False, True, True, False, True]
    paid_units, judged_units = [rewarded(*c) for c in cases], [judged(*c) for c in cases]
    paid_units[-1] = judged_units[-1] = None
    assert [own is None or not own.has_units for own in paid_units] == kept
    before = reward_streams(made)
    rewards = with_unit_rewards(made, before, paid_units, beta, "end")
    outcome = compute_advantages(made, recipe("reinforce"), before)
    advantages = with_unit_advantages(made, outcome, judged_units, beta)
    for place, keeps in enumerate(kept):
        own = paid_units[place]
        less = 0.0 if own is None or own.spans.tokens == 0 else beta * own.empty_value
        changed = of_tokens(made[place], rewards.values[place]) - of_tokens(made[place], before.values[place])
        assert changed.sum() == pytest.approx(-less, abs=1e-5)  # every episode that was scored earns as much less
        if keeps:
            assert not changed[:-1].any()
        assert same_bits(outcome.values[place], advantages.values[place]) == keeps
        assert of_tokens(made[place], rewards.values[place]).any() == (place != 2)
    # Only episodes with units have a part in the statistics.
    alone = with_unit_advantages(
        [made[0], made[3]], Advantages([outcome.values[0], outcome.values[3]]), [judged_units[0], judged_units[3]], beta
    )
    assert same_bits(alone.values[0], advantages.values[0])


@pytest.mark.parametrize("beta", BETAS)
def test_the_two_types_of_credit_are_not_interchangeable(beta):
    one, cuts, values = played(0, 3)
    rewards, advantages = reward_streams([one]), reward_streams_of_zero([one])
    with pytest.raises(TypeError, match="UnitAdvantages is not a reward"):
        with_unit_rewards([one], rewards, [judged(one, cuts, values)], beta, "end")
    with pytest.raises(TypeError, match="UnitRewards is not an advantage"):
        with_unit_advantages([one], advantages, [rewarded(one, cuts, values)], beta)
    neither = CreditedUnits(cuts, prefix(values), 1.0, 0.0)
    with pytest.raises(TypeError):
        with_unit_rewards([one], rewards, [neither], beta, "end")
    with pytest.raises(TypeError):
        with_unit_advantages([one], advantages, [neither], beta)


@pytest.mark.parametrize("beta", BETAS)
def test_the_return_from_a_unit_on_is_the_outcome_above_beta_times_the_value_before_it(beta):
    # So in the reward channel `prefix` is, for a unit, what `trunc` is as an advantage: a baseline of what stood before.
    one = episode((".ssss.s", {6: 3.0}))
    cuts, values = Spans.from_cuts(5, np.array([2, 3])), np.array([0.5, 1.0, -2.0, 3.0])
    paid = with_unit_rewards([one], reward_streams([one]), [rewarded(one, cuts, values)], beta, "end")
    found = of_tokens(one, compute_advantages([one], recipe("reinforce"), paid).values[0])
    expected = 3.0 - beta * values[:-1][cuts.unit_of_token]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    if beta == 1:
        np.testing.assert_allclose(found, trunc(values)[cuts.unit_of_token], rtol=1e-6)
