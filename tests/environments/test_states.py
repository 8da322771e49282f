"""The name that an environment gives a state."""

import pytest

from posttrain.environments.bandit import Bandit
from posttrain.environments.frozen_lake import FrozenLake
from posttrain.environments.sokoban import Sokoban


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
    assert environment.step(answer(["Right"], "")).state != start
    assert environment.step(answer(["Left"], "")).state == start
