"""Places in words."""

from posttrain.environments.game import offset, sides
from posttrain.environments.sokoban import Sokoban, SokobanRecipe


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
