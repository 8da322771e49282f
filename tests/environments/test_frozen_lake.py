"""The frozen lake: gymnasium's dynamics, and exact values of its players."""

import itertools

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from pydantic import ValidationError

from posttrain.environments.frozen_lake import FrozenLake, FrozenLakeRecipe
from posttrain.environments.frozen_lake_dynamics import (
    DIRECTIONS,
    best_answer,
    best_success,
    best_values,
    lake_of,
    random_success,
)
from posttrain.environments.game import play

SEEDS = range(110_000, 110_500)
"""As many lakes as are cached, so that they are drawn once for all tests."""


def _tiles(lake):
    letters = (
        dict.fromkeys(range(lake.size**2), "F") | dict.fromkeys(lake.holes, "H") | {lake.start: "S", lake.goal: "G"}
    )
    return ["".join(letters[row * lake.size + column] for column in range(lake.size)) for row in range(lake.size)]


@pytest.mark.parametrize(
    ("turns", "slippery", "random", "optimal"),
    [
        (5, True, 0.168, 0.311),
        (10, True, 0.231, 0.512),
        (25, True, 0.300, 0.787),
        (5, False, 0.168, 0.956),
        (10, False, 0.231, 1.0),
    ],
)
def test_baselines_agree_with_figures_measured_on_another_implementation(turns, slippery, random, optimal):
    found = FrozenLake.baselines(FrozenLakeRecipe(max_turns=turns, slippery=slippery), SEEDS)
    assert found["random"].success == pytest.approx(random, abs=0.025)
    assert found["optimal"].success == pytest.approx(optimal, abs=0.025)
    assert found["optimal"].interval is None


@pytest.mark.parametrize(("size", "slippery"), itertools.product((2, 4, 7), (True, False)))
def test_dynamics_are_those_of_gymnasium(size, slippery):
    for seed in range(5):
        lake = lake_of(seed, size, 0.8, slippery)
        table = FrozenLakeEnv(desc=_tiles(lake), is_slippery=slippery).P
        for cell, action in itertools.product(range(size**2), range(4)):
            assert lake.outcomes[cell][action] == tuple(reached[:2] for reached in table[cell][action])


def test_dynamics_follow_the_table_of_gymnasium():
    lake = lake_of(1, 4, 0.8, True)
    transitions = lake.transitions()
    draws = (np.arange(3000) + 0.5) / 3000
    for cell, action in itertools.product(range(16), range(4)):
        reached = np.bincount([lake.next_cell(cell, action, float(draw)) for draw in draws], minlength=16) / 3000
        np.testing.assert_allclose(reached, transitions[action, cell], atol=1e-3)
    lake = lake_of(0, 4, 1.0, False)
    centre = 5
    cells = [lake.next_cell(centre, DIRECTIONS.index(name), 0.0) for name in ("Left", "Down", "Right", "Up")]
    assert cells == [4, 9, 6, 1] or lake.goal == 5


def test_values_equal_the_means_of_sampled_episodes():
    """Independent of the dynamic programming: many plays on one lake under fresh chance events."""
    lake = lake_of(3, 4, 0.8, True)
    values = best_values(lake, 8, 1)
    draw = np.random.default_rng(0)
    won = {"best": 0, "random": 0}
    for player in won:
        for _ in range(4000):
            cell = lake.start
            for left in range(8, 0, -1):
                action = values.answers[left - 1][cell][0] if player == "best" else int(draw.integers(4))
                cell = lake.next_cell(cell, action, float(draw.random()))
            won[player] += cell == lake.goal
    assert won["best"] / 4000 == pytest.approx(best_success(lake, 8, 1), abs=0.025)
    assert won["random"] / 4000 == pytest.approx(random_success(lake, 8), abs=0.025)


def test_baselines_equal_the_means_of_episodes():
    recipe = FrozenLakeRecipe(format={"actions_per_turn": 2}, max_turns=4)
    environment, seeds = FrozenLake(recipe), SEEDS
    found = FrozenLake.baselines(recipe, seeds)
    best = np.mean([play(environment, seed)[-1].info["success"] for seed in seeds])
    assert best == pytest.approx(found["optimal"].success, abs=0.035)
    draw = np.random.default_rng(1)
    wins = [
        play(environment, s, (environment.random_answer(d) for d in draw.random(4)))[-1].info["success"] for s in seeds
    ]
    assert np.mean(wins) == pytest.approx(found["random"].success, abs=0.035)


def test_best_values_are_the_largest_over_all_policies_of_open_loop_answers():
    """One turn of two actions: the best of all 4 + 16 sequences, by multiplying the matrices out."""
    lake = lake_of(5, 4, 0.8, True)
    goal = np.zeros(16)
    goal[lake.goal] = 1
    t = lake.transitions()
    ones = [t[a] @ goal for a in range(4)]
    twos = [t[a] @ t[b] @ goal for a in range(4) for b in range(4)]
    np.testing.assert_allclose(best_values(lake, 1, 2).success[1], np.max(ones + twos, axis=0))


def test_more_turns_never_hurt_and_every_lake_can_be_crossed():
    for seed in range(20):
        lake = lake_of(seed, 4, 0.8, True)
        assert np.all(np.diff(best_values(lake, 6, 1).success, axis=0) >= -1e-12)
        assert best_success(lake, 6, 1) >= best_success(lake, 3, 2) - 1e-12
        assert best_success(lake, 3, 2) >= best_success(lake, 3, 1) - 1e-12
    lakes = [lake_of(seed, 5, 0.7, False) for seed in range(300)]
    assert all(best_success(lake, 25, 1) == 1 for lake in lakes)
    assert all(lake.start != lake.goal for lake in lakes)
    # Crossable lakes have fewer holes than all lakes.
    assert 0.15 < np.mean([len(lake.holes) for lake in lakes]) / 25 < 0.3


def test_firm_ice_is_planned_ahead_by_a_shortest_path():
    environment = FrozenLake(FrozenLakeRecipe(slippery=False, max_turns=20))
    for seed in range(50):
        lake = lake_of(seed, 4, 0.8, False)
        shortest = next(n for n in range(1, 20) if best_success(lake, n, 1) == 1)
        assert len(play(environment, seed)) == shortest
    lake = next(lake for lake in (lake_of(seed, 5, 0.8, False) for seed in range(100)) if best_success(lake, 4, 1) == 0)
    actions = best_answer(lake, lake.start, 5, 4)
    assert len(actions) == 4
    cell = lake.start
    for action in actions:
        cell = lake.next_cell(cell, action, 0.0)
    assert cell not in lake.holes


def test_success_is_the_goal_which_the_expert_cannot_foresee():
    environment, ends = FrozenLake(FrozenLakeRecipe(max_turns=30)), []
    for seed in range(200):
        environment.reset(seed)
        steps = play(environment, seed, [environment.random_answer(d) for d in np.random.default_rng(seed).random(30)])
        drawn = steps[-1].messages[0]["content"]
        assert steps[-1].info["success"] == ("√" in drawn)
        assert steps[-1].reward == (1.0 if "√" in drawn else 0.0)
        assert steps[-1].terminated == ("√" in drawn or "X" in drawn)
        ends.append("√" if "√" in drawn else "X" if "X" in drawn else "")
    assert set(ends) >= {"√", "X"}
    # Two seeds' chance events on one lake: the first answer is the same.
    environment = FrozenLake(FrozenLakeRecipe())
    environment.reset(7)
    first = environment.expert()
    environment._slips = [1 - slip for slip in environment._slips]
    assert environment.expert() == first


def test_observations_in_words():
    environment = FrozenLake(FrozenLakeRecipe(observation="coordinates", slippery=False))
    text = environment.reset(0).messages[1]["content"]
    lake = lake_of(0, 4, 0.8, False)
    assert text.startswith(
        f"You: row {lake.start // 4}, column {lake.start % 4}. Goal: row {lake.goal // 4}, column {lake.goal % 4}. Holes: "
    )
    assert all(f"({hole // 4}, {hole % 4})" in text for hole in lake.holes)
    assert environment.step("nonsense").messages[0]["content"].count("row") == 1
    environment = FrozenLake(FrozenLakeRecipe(observation="local", edges=True))
    for seed in range(20):
        text = environment.reset(seed).messages[1]["content"]
        row, column = divmod(lake_of(seed, 4, 0.8, True).start, 4)
        at_edge = {"left": column == 0, "right": column == 3, "up": row == 0, "down": row == 3}
        assert text.endswith(f" Edges: {', '.join(name for name, there in at_edge.items() if there) or 'none'}.")
    with pytest.raises(ValidationError, match="`edges` has no effect"):
        FrozenLakeRecipe(observation="grid", edges=True)


def test_returning_to_a_position_is_the_same_state():
    environment = FrozenLake(FrozenLakeRecipe(slippery=False, frozen_probability=1.0, max_turns=3))
    start = environment.reset(0).state
    answer = environment.recipe.format.render
    assert environment.step(answer(["Right"], "")).state != start
    assert environment.step(answer(["Left"], "")).state == start
