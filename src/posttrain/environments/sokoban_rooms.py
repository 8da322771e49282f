"""Sokoban rooms: the rules, random rooms with a solution, and solvers."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from posttrain.seeds import random_stream

State = tuple[int, frozenset[int]]
"""The player's cell and the cells of the boxes; cells are numbered row by row."""

_MAX_ROOM_STATES = 100_000
_ATTEMPTS = 1000
_STEPS_PER_SIDE = 1.7
_TURN = 0.35
_BRUSHES = (
    ((0, 0), (0, -1), (0, 1)),
    ((0, 0), (-1, 0), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
    ((0, 0), (0, -1), (1, 0)),
    ((0, 0), (0, 1), (1, 0), (1, 1)),
)


@dataclass(frozen=True)
class Room:
    """A room. `floor` are the cells that are not wall, targets included."""

    rows: int
    columns: int
    floor: frozenset[int]
    targets: frozenset[int]

    def directions(self) -> tuple[int, int, int, int]:
        """Return the cell offsets of Up, Down, Left, Right. The surrounding wall keeps results inside the room."""
        return -self.columns, self.columns, -1, 1

    def move(self, state: State, direction: int) -> State:
        """Return the state after a move in `direction`: a walk, a push, or no change if the way is blocked."""
        player, boxes = state
        ahead = player + direction
        if ahead not in self.floor:
            return state
        if ahead not in boxes:
            return ahead, boxes
        beyond = ahead + direction
        if beyond not in self.floor or beyond in boxes:
            return state
        return ahead, (boxes - {ahead}) | {beyond}

    def solved(self, state: State) -> bool:
        """Whether all boxes are on targets."""
        return state[1] == self.targets


@lru_cache(maxsize=4096)
def room_of(
    seed: int, rows: int, columns: int, num_boxes: int, search_depth: int, player_moves: int
) -> tuple[Room, State]:
    """Return the room of `seed` and its start, which has a solution of `search_depth` moves after undoing
    `player_moves`.

    A random walk carves the floor, and targets are drawn on it. Playing backwards gives all states with a solution of
    at most `search_depth` moves. The start is drawn from the states whose boxes are farthest from the targets and,
    among these, nearest to the solution. RuntimeError if no room of these sizes is found.
    """
    for attempt in range(_ATTEMPTS):
        draw = random_stream("sokoban", seed, "room", attempt)
        floor = _carve(draw, rows, columns)
        if len(floor) < num_boxes + 2:
            continue
        chosen = draw.choice(sorted(floor), num_boxes, replace=False)
        room = Room(rows, columns, floor, frozenset(int(cell) for cell in chosen))
        far = {
            cell: min(abs(cell // columns - t // columns) + abs(cell % columns - t % columns) for t in room.targets)
            for cell in floor
        }
        ranks: dict[State, tuple[int, int]] = {
            state: (sum(far[box] for box in state[1]), -moves)
            for state, moves in solutions_backwards(room, search_depth).items()
            if not state[1] & room.targets
        }
        if ranks:
            best = max(ranks.values())
            starts = [state for state, rank in ranks.items() if rank == best]
            player, boxes = starts[int(draw.integers(len(starts)))]
            for _ in range(player_moves):  # without pushing a box, so that every move can be undone
                ahead = [player + direction for direction in room.directions()]
                free = [cell for cell in ahead if cell in room.floor and cell not in boxes]
                if free:
                    player = free[int(draw.integers(len(free)))]
            return room, (player, boxes)
    raise RuntimeError(
        f"no room of {rows} x {columns} with {num_boxes} boxes was found for seed {seed}; make it larger"
    )


def solutions_backwards(room: Room, depth: int) -> dict[State, int]:
    """Return state -> minimum number of moves to a solution, for all states with at most `depth`, in increasing order.

    The search stops after 100,000 states, so larger rooms are explored only near their solutions.
    """
    moves: dict[State, int] = {(player, room.targets): 0 for player in sorted(room.floor - room.targets)}
    edge = list(moves)
    for distance in range(1, depth + 1):
        following: list[State] = []
        for state in edge:
            for direction in room.directions():
                for earlier in _before(room, state, direction):
                    if earlier not in moves:
                        moves[earlier] = distance
                        following.append(earlier)
        edge = following
        if not edge or len(moves) > _MAX_ROOM_STATES:
            break
    return moves


def _before(room: Room, state: State, direction: int) -> list[State]:
    """Return the states from which a move in `direction` leads to `state`: by a walk, and by a push."""
    player, boxes = state
    behind = player - direction
    if behind not in room.floor or behind in boxes:
        return []
    if player + direction in boxes:
        return [(behind, boxes), (behind, (boxes - {player + direction}) | {player})]
    return [(behind, boxes)]


def _carve(draw: np.random.Generator, rows: int, columns: int) -> frozenset[int]:
    row, column = int(draw.integers(1, rows - 1)), int(draw.integers(1, columns - 1))
    heading = int(draw.integers(4))
    floor: set[int] = set()
    for _ in range(int(_STEPS_PER_SIDE * (rows + columns))):
        if draw.random() < _TURN:
            heading = int(draw.integers(4))
        down, right = ((-1, 0), (1, 0), (0, -1), (0, 1))[heading]
        row, column = min(max(row + down, 1), rows - 2), min(max(column + right, 1), columns - 2)
        for brush_row, brush_column in _BRUSHES[int(draw.integers(len(_BRUSHES)))]:
            r, c = row + brush_row, column + brush_column
            if 1 <= r < rows - 1 and 1 <= c < columns - 1:
                floor.add(r * columns + c)
    return frozenset(floor)


_MAX_SOLVER_STATES = 300_000


@lru_cache(maxsize=16384)
def shortest_solution(room: Room, start: State) -> tuple[int, ...] | None:
    """Return the indices of the directions of a shortest solution; None if there is no solution.

    Breadth-first search over (player, boxes) that skips states with a box on a cell from which it cannot reach a
    target. NotImplementedError if the search exceeds 300,000 states.
    """
    live = _live_cells(room)
    parents: dict[State, tuple[State, int] | None] = {start: None}
    edge = [start]
    while edge:
        following: list[State] = []
        for state in edge:
            if room.solved(state):
                way: list[int] = []
                while (step := parents[state]) is not None:
                    state, number = step
                    way.append(number)
                return tuple(reversed(way))
            for number, direction in enumerate(room.directions()):
                reached = room.move(state, direction)
                if reached not in parents and (reached[1] == state[1] or reached[1] <= live):
                    parents[reached] = (state, number)
                    following.append(reached)
        edge = following
        if len(parents) > _MAX_SOLVER_STATES:
            raise NotImplementedError("the room has too many states to search for its shortest solution")
    return None


def random_player(
    room: Room, start: State, moves: int, reward: Callable[[State, State], float], most_states: int
) -> tuple[float, float] | None:
    """Return the probability that `moves` uniformly random moves solve the room, and their expected return.

    Exact: the distribution over states is propagated move by move. `reward(before, after)` is the reward of a move.
    None if the distribution has more than `most_states` states.
    """
    states: dict[State, float] = {start: 1.0}
    solved = expected = 0.0
    for _ in range(moves):
        following: dict[State, float] = defaultdict(float)
        for state, probability in states.items():
            for direction in room.directions():
                reached = room.move(state, direction)
                expected += probability / 4 * reward(state, reached)
                if room.solved(reached):
                    solved += probability / 4
                else:
                    following[reached] += probability / 4
        if len(following) > most_states:
            return None
        states = following
    return solved, expected


@lru_cache(maxsize=4096)
def _live_cells(room: Room) -> frozenset[int]:
    """Return the cells from which a single box can be pushed to some target."""
    live, edge = set(room.targets), list(room.targets)
    while edge:
        box = edge.pop()
        for direction in room.directions():
            before, player = box - direction, box - 2 * direction
            if before in room.floor and player in room.floor and before not in live:
                live.add(before)
                edge.append(before)
    return frozenset(live)
