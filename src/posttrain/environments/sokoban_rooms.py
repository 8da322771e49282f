"""Sokoban rooms: their rules, and random ones that can be solved because they were played backwards."""

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
    """Walls and targets. `floor` are the cells that are not wall, targets included."""

    rows: int
    columns: int
    floor: frozenset[int]
    targets: frozenset[int]

    def directions(self) -> tuple[int, int, int, int]:
        """What to add to a cell to go Up, Down, Left, Right. Walls all around keep that inside the room."""
        return -self.columns, self.columns, -1, 1

    def move(self, state: State, direction: int) -> State:
        """The state after a step in `direction`; a push where a box is in the way, nothing where it cannot move."""
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
        """All boxes are on targets."""
        return state[1] == self.targets


@lru_cache(maxsize=4096)
def room_of(
    seed: int, rows: int, columns: int, num_boxes: int, search_depth: int, player_moves: int
) -> tuple[Room, State]:
    """The room of `seed` and its start, which can be solved in `search_depth` moves and those that undo `player_moves`.

    A random walk carves the floor; targets are drawn on it; all states from which the room is solved in at most
    `search_depth` moves are found by playing backwards; the start is one of those that have the boxes farthest from
    the targets, and among them nearest to a solution. RuntimeError where no room of these sizes is found.
    """
    for attempt in range(_ATTEMPTS):
        draw = random_stream("sokoban", seed, "room", attempt)
        floor = _carve(draw, rows, columns)
        if len(floor) < num_boxes + 2:
            continue
        chosen = draw.choice(sorted(floor), num_boxes, replace=False)
        room = Room(rows, columns, floor, frozenset(int(cell) for cell in chosen))
        starts = _farthest(room, search_depth)
        if starts:
            start = starts[int(draw.integers(len(starts)))]
            return room, _wander(draw, room, start, player_moves)
    raise RuntimeError(
        f"no room of {rows} x {columns} with {num_boxes} boxes was found for seed {seed}; make it larger"
    )


def solutions_backwards(room: Room, depth: int) -> dict[State, int]:
    """The fewest moves that solve the room, for every state where that is at most `depth`, nearest first.

    The search stops after 100,000 states: rooms that large are explored only near their solutions.
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
    """The states from which a step in `direction` leads to `state`: by a walk, and by a push."""
    player, boxes = state
    behind = player - direction
    if behind not in room.floor or behind in boxes:
        return []
    if player + direction in boxes:
        return [(behind, boxes), (behind, (boxes - {player + direction}) | {player})]
    return [(behind, boxes)]


def _farthest(room: Room, depth: int) -> list[State]:
    best: tuple[int, int] = (0, 0)
    starts: list[State] = []
    for state, moves in solutions_backwards(room, depth).items():
        if state[1] & room.targets:
            continue
        rank = (sum(_to_target(room, box) for box in state[1]), -moves)
        if not starts or rank > best:
            best, starts = rank, []
        if rank == best:
            starts.append(state)
    return starts


def _to_target(room: Room, box: int) -> int:
    row, column = divmod(box, room.columns)
    return min(abs(row - target // room.columns) + abs(column - target % room.columns) for target in room.targets)


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


def _wander(draw: np.random.Generator, room: Room, state: State, moves: int) -> State:
    """Walk the player about without touching a box, so that every step can be taken back."""
    for _ in range(moves):
        player, boxes = state
        free = [player + d for d in room.directions() if player + d in room.floor and player + d not in boxes]
        if free:
            state = free[int(draw.integers(len(free)))], boxes
    return state


_MAX_SOLVER_STATES = 300_000


@lru_cache(maxsize=16384)
def shortest_solution(room: Room, start: State) -> tuple[int, ...] | None:
    """Numbers of the directions that solve the room in the fewest moves; None where nothing does.

    Breadth-first over (player, boxes), leaving out boxes on cells from which no target can be reached.
    NotImplementedError where that takes more than 300,000 states.
    """
    live = _live_cells(room)
    came: dict[State, tuple[State, int] | None] = {start: None}
    edge = [start]
    while edge:
        following: list[State] = []
        for state in edge:
            if room.solved(state):
                return _way_to(state, came)
            for number, direction in enumerate(room.directions()):
                reached = room.move(state, direction)
                if reached not in came and (reached[1] == state[1] or reached[1] <= live):
                    came[reached] = (state, number)
                    following.append(reached)
        edge = following
        if len(came) > _MAX_SOLVER_STATES:
            raise NotImplementedError("this room has too many states to search for its shortest solution")
    return None


def random_player(
    room: Room, start: State, moves: int, reward: Callable[[State, State], float], most_states: int
) -> tuple[float, float] | None:
    """Probability that `moves` uniformly random moves solve the room, and their expected return.

    Exact: the distribution over states is carried forward move by move. `reward(before, after)` is what a move pays.
    None where more than `most_states` states are held at once.
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
    """Cells from which a lone box can be pushed to some target."""
    live, edge = set(room.targets), list(room.targets)
    while edge:
        box = edge.pop()
        for direction in room.directions():
            before, player = box - direction, box - 2 * direction
            if before in room.floor and player in room.floor and before not in live:
                live.add(before)
                edge.append(before)
    return frozenset(live)


def _way_to(state: State, came: dict[State, tuple[State, int] | None]) -> tuple[int, ...]:
    way: list[int] = []
    while (step := came[state]) is not None:
        state, number = step
        way.append(number)
    return tuple(reversed(way))
