"""Turn-level credit through `assign`: tokens of the environment, several streams, rewards inside a turn."""

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from posttrain.credit.assign import compute_advantages, reward_streams
from posttrain.episode import Advantages, Episode, Outcome, RewardStreams, StopReason, Stream, Turn
from posttrain.recipe.credit import CreditRecipe

KINDS = ["turn_returns", "mt_grpo", "gigpo", "bilevel_gae"]


def recipe(kind, **keys):
    return TypeAdapter(CreditRecipe).validate_python({"type": kind} | keys)


def episode(*streams, group=0, index=0, states=None):
    """Each stream as (turns, rewards): "." for tokens of the environment, a digit for those of a turn."""
    made = []
    for marks, paid in streams:
        of = np.array([-1 if c == "." else int(c) for c in marks], dtype=np.int32)
        rewards = np.zeros(len(of), dtype=np.float32)
        rewards[list(paid)] = list(paid.values())
        made.append(Stream(np.arange(len(of)), of >= 0, np.zeros(len(of), np.float32), rewards, of, np.minimum(of, 0)))
    turns = [Turn(0, 0, 1, 0.0, StopReason.END_TOKEN, "", state=state) for state in states or ()]
    return Episode(group, group, index, 0, made, turns, Outcome.TERMINATED)


def credit_of(episodes, chosen):
    values = [[np.ones(len(s)) for s in e.streams] for e in episodes]
    return compute_advantages(episodes, chosen, reward_streams(episodes), values=values)


def test_every_token_of_a_turn_gets_the_credit_of_the_turn_across_streams():
    one = episode(("..00.1", {3: 1.0, 5: 2.0}), ("....22", {5: 8.0}))
    (first, second) = credit_of([one], recipe("turn_returns", discount=0.5, baseline="none")).values[0]
    np.testing.assert_array_equal(first, np.array([0, 0, 4, 4, 0, 6], dtype=np.float32))
    np.testing.assert_array_equal(second, [0, 0, 0, 0, 8, 8])
    assert first.dtype == np.float32


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_the_environment_and_long_answers_do_not_decay_credit_over_turns(kind):
    def group(shown, length):
        paid = [(0.0, 1.0), (2.0, 5.0), (1.0, 3.0)]
        return [
            episode(
                (".." + "0" * length + "." * shown + "1" * length, {1 + length: a, 1 + 2 * length + shown: b}),
                index=i,
                states=["start", "middle"],
            )
            for i, (a, b) in enumerate(paid)
        ]

    short, long = group(1, 2), group(9, 2)
    found, same = (credit_of(made, recipe(kind)).values for made in (short, long))
    for i in range(3):
        mask, other = short[i].streams[0].sampled, long[i].streams[0].sampled
        np.testing.assert_array_equal(found[i][0][mask], same[i][0][other])
        assert not found[i][0][~mask].any()
    if kind != "bilevel_gae":  # its tokens differ within a turn, by their values
        longer = credit_of(group(1, 7), recipe(kind)).values
        np.testing.assert_array_equal([own[0][2] for own in longer], [own[0][2] for own in found])


def test_where_a_stream_is_split_changes_nothing():
    whole = [episode(("..00..11", {3: 1.0, 7: 2.0}), states=["a", "b"]), episode(("..00", {3: 2.0}), states=["a"])]
    split = [episode(("..00", {3: 1.0}), ("......11", {7: 2.0}), states=["a", "b"]), whole[1]]
    for kind in KINDS:
        one, two = (credit_of(made, recipe(kind)).values for made in (whole, split))
        np.testing.assert_array_equal(one[0][0][[2, 3, 6, 7]], np.concatenate([two[0][0][2:], two[0][1][6:]]))


def test_rewards_inside_a_turn_are_the_turns():
    spread, at_end = episode((".000.1", {1: 0.5, 2: 0.25, 3: 0.25, 5: 4.0})), episode((".000.1", {3: 1.0, 5: 4.0}))
    chosen = recipe("turn_returns", baseline="none")
    np.testing.assert_array_equal(credit_of([spread], chosen).values[0][0], credit_of([at_end], chosen).values[0][0])


def test_groups_of_different_sizes_and_episodes_of_different_turns_in_any_order():
    made = [
        episode((".0.1", {1: 1.0, 3: 1.0}), group=1),
        episode((".0", {1: 3.0}), group=5),
        episode((".0", {1: 4.0}), group=1, index=1),
        episode((".0.1.2", {3: 1.0, 5: 2.0}), group=1, index=2),
        episode((".0.1", {3: 7.0}), group=5, index=1),
    ]
    order = [3, 1, 4, 0, 2]
    for kind in KINDS:
        straight, turned = (credit_of(e, recipe(kind)).values for e in (made, [made[i] for i in order]))
        for place, own in zip(order, turned, strict=True):
            np.testing.assert_array_equal(straight[place][0], own[0], err_msg=kind)
        assert any(own[0].any() for own in straight)


@pytest.mark.parametrize("kind", KINDS)
def test_no_episodes_and_an_episode_without_sampled_tokens(kind):
    assert compute_advantages([], recipe(kind), RewardStreams([]), values=[]) == Advantages([])
    made = [episode(("...", {})), episode((".0.1", {1: 1.0, 3: 1.0}), index=1)]
    assert not credit_of(made, recipe(kind)).values[0][0].any()


def test_keys_of_another_type_are_refused():
    with pytest.raises(ValidationError, match="step_weight"):
        recipe("mt_grpo", step_weight=1.0)
