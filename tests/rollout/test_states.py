"""The name that an environment gives a state goes with the turn that was played in it, and into the store."""

import pytest

from posttrain.environments.bandit import Bandit
from posttrain.environments.frozen_lake import FrozenLake
from posttrain.environments.sokoban import Sokoban
from posttrain.rollout.store import read_episodes, write_episodes

from .episodes import played


def test_the_store_keeps_names_of_states(tmp_path):
    named, unnamed = played(rewards=(1.0, 2.0)), played(rewards=(1.0,))
    named.turns[0].state, named.turns[1].state = "room 1", ""
    stored = read_episodes(write_episodes(tmp_path, 1, "train", [named, unnamed])).episodes
    assert [turn.state for episode in stored for turn in episode.turns] == ["room 1", "", None]


@pytest.mark.parametrize("game", [Bandit, FrozenLake, Sokoban])
def test_state_names_do_not_depend_on_the_rendering(game):
    environment = game(game.Recipe())
    start = environment.reset(3).state
    assert start == environment.reset(3).state
    assert environment.step("nonsense").state == start  # the state is unchanged, although the text contains the reason
    after = environment.step(environment.expert()) if game is not Bandit else None
    assert after is None or after.state is not None


def test_returning_to_a_position_is_the_same_state():
    environment = FrozenLake(FrozenLake.Recipe(slippery=False, frozen_probability=1.0, max_turns=3))
    start = environment.reset(0).state
    answer = environment.recipe.format.render
    there = {name: environment.step(answer([name], "")).state for name in ("Right",)}["Right"]
    assert there != start
    assert environment.step(answer(["Left"], "")).state == start
