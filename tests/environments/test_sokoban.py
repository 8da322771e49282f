"""Sokoban: its rules, its rooms, shortest solutions, and the random player."""

from collections import Counter

import numpy as np
import pytest

from posttrain.environments import sokoban
from posttrain.environments.game import offset, play, sides
from posttrain.environments.sokoban import ACTIONS, Sokoban, SokobanRecipe
from posttrain.environments.sokoban_rooms import Room, random_player, room_of, shortest_solution, solutions_backwards

UP, DOWN, LEFT, RIGHT = -6, 6, -1, 1


def _room(text):
    """A 6-column room and its state from a drawing: `.` target, `$` box, `@` player, `*` box on target."""
    rows = text.split()
    cells = {row * 6 + column: sign for row, line in enumerate(rows) for column, sign in enumerate(line)}
    pick = lambda signs: frozenset(cell for cell, sign in cells.items() if sign in signs)  # noqa: E731
    return Room(len(rows), 6, pick("_.$@*"), pick(".*")), (min(pick("@")), pick("$*"))


CORRIDOR = "###### #@$_.# ######"


def test_the_rules_of_moves_and_rewards():
    room, start = _room(CORRIDOR)
    once = room.move(start, RIGHT)
    assert once == (8, frozenset({9}))
    assert room.move(once, LEFT) == (7, frozenset({9}))
    assert room.move(start, UP) == start
    solved = room.move(once, RIGHT)
    assert room.solved(solved)
    assert room.move(solved, RIGHT) == solved
    two, state = _room("###### #@$$.# ######")
    assert two.move(state, RIGHT) == state
    recipe = SokobanRecipe(step_reward=-0.1, box_reward=1, solved_reward=10)
    room, start = _room(CORRIDOR)
    once = room.move(start, RIGHT)
    assert recipe.move_reward(room, start, once) == pytest.approx(-0.1)
    assert recipe.move_reward(room, once, room.move(once, RIGHT)) == pytest.approx(10.9)
    room, start = _room("###### #@*_$. ######")
    assert recipe.move_reward(room, start, room.move(start, RIGHT)) == pytest.approx(-1.1)
    recipe = SokobanRecipe(max_turns=40)
    for seed in range(30):
        steps = play(Sokoban(recipe), seed)
        assert sum(step.reward for step in steps) == pytest.approx(11 - 0.1 * len(steps))
    environment = Sokoban(SokobanRecipe(format={"penalty": -0.5}))
    environment.reset(0)
    assert environment.step("up").reward == pytest.approx(-0.6)
    room, state = _room("###### #__$## #.@__# ######")
    assert shortest_solution(room, state) is None
    environment = Sokoban(SokobanRecipe())
    environment.reset(0)
    environment._room, environment._position = room, state
    assert environment.format.parse(environment.expert(), ACTIONS)


@pytest.mark.parametrize(("boxes", "size"), [(1, 6), (2, 6), (1, 8), (3, 7)])
def test_rooms_are_walled_in_and_solvable_with_every_box_off_target(boxes, size):
    for seed in range(25):
        room, (player, cells) = room_of(seed, size, size, boxes, 30, 0)
        assert all(0 < c // size < size - 1 and 0 < c % size < size - 1 for c in room.floor)
        assert len(cells) == len(room.targets) == boxes
        assert cells <= room.floor
        assert not cells & room.targets
        assert player in room.floor - cells
        assert any(player + direction in cells for direction in room.directions())
        assert shortest_solution(room, (player, cells)) is not None


@pytest.mark.parametrize("boxes", [1, 2])
def test_searching_forwards_and_playing_backwards_agree(boxes):
    room, start = room_of(4, 6, 6, boxes, 30, 0)
    backwards = solutions_backwards(room, 200)
    assert start in backwards
    for state in list(backwards)[:: max(1, len(backwards) // 150)]:
        way = shortest_solution(room, state)
        assert way is not None
        assert len(way) == backwards[state]
        for number in way:
            state = room.move(state, room.directions()[number])
        assert room.solved(state)


def test_rooms_have_the_stated_difficulty():
    assert all(len(shortest_solution(*room_of(seed, 6, 6, 1, 3, 0))) <= 3 for seed in range(40))
    lengths = Counter(len(shortest_solution(*room_of(seed, 6, 6, 1, 30, 0))) for seed in range(400))
    within = [sum(lengths[n] for n in range(1, most + 1)) / 400 for most in (1, 2, 5)]
    np.testing.assert_allclose(within, [0.286, 0.532, 0.852], atol=0.12)
    for seed in range(30):
        room, start = room_of(seed, 6, 6, 1, 30, 0)
        other, moved = room_of(seed, 6, 6, 1, 30, 3)
        assert (room, start[1]) == (other, moved[1])
        assert len(shortest_solution(other, moved)) <= len(shortest_solution(room, start)) + 3


def test_baselines_and_the_random_player_are_exact(monkeypatch):
    recipe = SokobanRecipe()
    draw = np.random.default_rng(0)
    room, start = room_of(0, 6, 6, 1, 30, 0)
    success, paid = random_player(room, start, 5, lambda a, b: recipe.move_reward(room, a, b), 4000)
    environment = Sokoban(recipe)
    games = [play(environment, 0, [environment.random_answer(d) for d in draw.random(5)]) for _ in range(4000)]
    assert np.mean([steps[-1].info["success"] for steps in games]) == pytest.approx(success, abs=0.03)
    assert np.mean([sum(step.reward for step in steps) for steps in games]) == pytest.approx(paid, abs=0.3)
    recipe = SokobanRecipe()
    found = Sokoban.baselines(recipe, range(300))
    lengths = [len(shortest_solution(*room_of(seed, 6, 6, 1, 30, 0))) for seed in range(300)]
    assert found["optimal"].success == np.mean([length <= 5 for length in lengths])
    assert found["random"].success == pytest.approx(0.2, abs=0.06)
    assert found["random"].interval is None
    assert found["random"].n == found["optimal"].n == 300
    recipe, seeds = SokobanRecipe(num_boxes=2, max_turns=10), range(20)
    exact = Sokoban.baselines(recipe, seeds)["random"]
    monkeypatch.setattr(sokoban, "_MOST_STATES", 1)
    sampled = Sokoban.baselines(recipe, seeds)["random"]
    assert sampled.interval[0] <= exact.success <= sampled.interval[1]
    assert sampled.interval[0] < sampled.success < sampled.interval[1]
    assert sampled.mean_return == pytest.approx(exact.mean_return, abs=0.2)


def test_symbols_observations_and_plural_are_described():
    one = SokobanRecipe(observation="coordinates")
    system, user = Sokoban(one).reset(0).messages
    assert "the box onto the target" in system["content"]
    assert all(word in user["content"] for word in ("You: row", "Boxes: (", "Targets: (", "Floor: ("))
    system, user = Sokoban(SokobanRecipe(num_boxes=2)).reset(0).messages
    assert "every box X onto a target O" in system["content"]
    assert Counter(user["content"].split())["X"] == 2
    assert set(user["content"].split()) <= set("#_XOPS")


def test_places_in_words_on_four_columns():
    offsets = {(9, 0): "2 down, 1 right", (0, 9): "2 up, 1 left", (5, 5): "here", (7, 4): "3 right", (0, 12): "3 up"}
    assert {pair: offset(*pair, 4) for pair in offsets} == offsets
    # Sides do not wrap around the edge.
    given = [({4, 6, 1, 9}, 5), ({3}, 4), ({8, 5}, 4)]
    assert [sides(cells, origin, 4) for cells, origin in given] == ["left, right, up, down", "none", "right, down"]


def test_the_local_view_of_a_room_matches_the_whole_view():
    local = Sokoban(SokobanRecipe(observation="local")).reset(3).messages[-1]["content"]
    rows = [line.split() for line in Sokoban(SokobanRecipe()).reset(3).messages[-1]["content"].splitlines()]
    where = {symbol: 6 * r + c for r, row in enumerate(rows) for c, symbol in enumerate(row) if symbol in "PXOS"}
    player = where.get("P", where.get("S"))
    walls = {6 * r + c for r, row in enumerate(rows) for c, symbol in enumerate(row) if symbol == "#"}
    target, beside = offset(where.get("O", player), player, 6), sides(walls, player, 6)
    assert local == f"Box: {offset(where['X'], player, 6)}. Target: {target}. Walls: {beside}."
