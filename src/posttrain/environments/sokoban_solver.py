"""Solving Sokoban, and what a random player makes of it: both exact where the states can be counted."""

from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache

from posttrain.environments.sokoban_rooms import Room, State

_STATES = 300_000


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
        if len(came) > _STATES:
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
