"""Turns derived from tokens: their ends, rewards and states."""

import numpy as np
import pytest

from posttrain.credit.turns import state_keys, to_tokens, turn_indices, turn_rewards, turn_starts
from posttrain.episode import Episode, Outcome, StopReason, Stream, Turn
from posttrain.errors import RunError


def stream(ids, turn):
    """A stream of these token ids; `turn` as text, "." for tokens that were not sampled, a digit for a turn's."""
    of = np.array([-1 if c == "." else int(c) for c in turn], dtype=np.int32)
    nothing = np.zeros(len(of), dtype=np.float32)
    return Stream(np.array(ids, dtype=np.int64), of >= 0, nothing, nothing.copy(), of, np.minimum(of, 0))


def episode(*streams, states=()):
    turns = [Turn(0, 0, 1, 0.0, StopReason.END_TOKEN, "", state=state) for state in states]
    return Episode(0, 0, 0, 0, list(streams), turns, Outcome.TERMINATED)


def test_a_turn_without_reward_counts_as_a_turn():
    turns = np.array([0, 0, 1, 2, 2, 2])
    np.testing.assert_array_equal(turn_starts(turns), [0, 2, 3])
    np.testing.assert_array_equal(turn_rewards(np.array([0.0, 1, 0, 0, 0.5, 2]), turns), [1, 0, 2.5])
    np.testing.assert_array_equal(to_tokens(np.array([3.0, 4, 5]), turns), [3, 3, 4, 5, 5, 5])


def test_turns_run_across_streams_and_answers_that_touch_are_two():
    played = episode(stream(range(5), ".0011"), stream(range(3), "..2"))
    np.testing.assert_array_equal(turn_indices(played), [0, 0, 1, 1, 2])
    assert len(state_keys(played)) == 3


def test_an_episode_without_sampled_tokens_has_no_turns():
    played = episode(stream(range(3), "..."))
    assert len(turn_indices(played)) == len(turn_rewards(np.zeros(0), turn_indices(played))) == 0
    assert state_keys(played) == []


def test_turns_out_of_order_are_reported():
    with pytest.raises(RunError, match=r"group 0 episode 0 .* turns out of order"):
        turn_indices(episode(stream(range(3), ".10")))


def test_states_are_the_tokens_shown_since_the_last_answer():
    played = episode(stream([7, 8, 1, 5, 2, 5, 3, 7, 8, 4], ".." + "0.1.2" + "..3"))
    first, second, third, fourth = state_keys(played)
    assert second == third  # token 5 after two different answers
    assert first == fourth  # tokens 7, 8, at the start and at the end
    assert first != second


def test_a_number_is_one_state_for_any_digits():
    # Ids 1, 2 are not id 12: no text is made of them.
    one, other = episode(stream([1, 2, 9], "..0")), episode(stream([12, 9], ".0"))
    assert state_keys(one) != state_keys(other)


def test_a_name_from_the_environment_precedes_token_names():
    shown_differently = (
        episode(stream([1, 9], ".0"), states=["cell 3"]),
        episode(stream([2, 9], ".0"), states=["cell 3"]),
    )
    assert state_keys(shown_differently[0]) == state_keys(shown_differently[1]) == [("named", "cell 3")]
    shown_alike = episode(stream([1, 9], ".0"), states=["a"]), episode(stream([1, 9], ".0"), states=["b"])
    assert state_keys(shown_alike[0]) != state_keys(shown_alike[1])
