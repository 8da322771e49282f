"""Frozen lakes: random maps, and the dynamics that gymnasium's FrozenLake-v1 gives them."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from posttrain.seeds import random_stream

DIRECTIONS = ("Left", "Down", "Right", "Up")
"""The actions in gymnasium's order."""


@dataclass(frozen=True, eq=False)
class Lake:
    """One lake. Cells are numbered row by row; S = size * size of them."""

    size: int
    slippery: bool
    start: int
    goal: int
    holes: frozenset[int]
    outcomes: tuple[tuple[tuple[tuple[float, int], ...], ...], ...]
    """`outcomes[cell][action]`: (probability, next cell) in gymnasium's order."""

    def transitions(self) -> np.ndarray:
        """[4, S, S] float64: probability of `[action, cell, next]`; holes and goal lead to themselves.

        Made anew at each call, for lakes are kept by the hundred and this is their largest part.
        """
        matrix = np.zeros((4, self.size**2, self.size**2))
        for cell, actions in enumerate(self.outcomes):
            for action, reached in enumerate(actions):
                for chance, following in reached:
                    matrix[action, cell, following] += chance
        return matrix

    def next_cell(self, cell: int, action: int, draw: float) -> int:
        """Where `action` leads from `cell` under the chance event `draw` in [0, 1)."""
        reached = 0.0
        for probability, following in self.outcomes[cell][action]:
            reached += probability
            if draw < reached:
                return following
        return self.outcomes[cell][action][-1][1]


@lru_cache(maxsize=512)
def lake_of(seed: int, size: int, frozen: float, slippery: bool) -> Lake:
    """The lake of `seed`: cells frozen with probability `frozen`, drawn again until the goal can be walked to."""
    draw = random_stream("frozen_lake", seed, "map")
    while True:
        ice = draw.random(size * size) < frozen
        start, goal = (int(cell) for cell in draw.choice(size * size, 2, replace=False))
        ice[[start, goal]] = True
        if _reachable(ice, size, start, goal):
            return _lake(ice, size, slippery, start, goal)


def _lake(ice: np.ndarray, size: int, slippery: bool, start: int, goal: int) -> Lake:
    tiles = np.where(ice, "F", "H")
    tiles[start], tiles[goal] = "S", "G"
    rows = ["".join(row) for row in tiles.reshape(size, size)]
    table = FrozenLakeEnv(desc=rows, is_slippery=slippery).P
    outcomes = tuple(
        tuple(tuple((float(chance), int(cell)) for chance, cell, *_ in table[state][action]) for action in range(4))
        for state in range(size * size)
    )
    return Lake(size, slippery, start, goal, frozenset(np.flatnonzero(~ice).tolist()), outcomes)


def _reachable(ice: np.ndarray, size: int, start: int, goal: int) -> bool:
    seen, edge = {start}, [start]
    while edge:
        cell = edge.pop()
        row, column = divmod(cell, size)
        around = ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1))
        near = {r * size + c for r, c in around if 0 <= r < size and 0 <= c < size and ice[r * size + c]}
        edge.extend(near - seen)
        seen |= near
    return goal in seen
