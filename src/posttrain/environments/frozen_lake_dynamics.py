"""Frozen lakes: random maps, and the dynamics that gymnasium's FrozenLake-v1 gives them."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from posttrain.plugins import require_module
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
    gymnasium = require_module("gymnasium.envs.toy_text.frozen_lake", "environment.type: frozen_lake")
    table = gymnasium.FrozenLakeEnv(desc=rows, is_slippery=slippery).P
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


_DISCOUNT = 0.95


@dataclass(frozen=True)
class Values:
    """What the best player can do with 0, 1, ... turns left."""

    success: np.ndarray
    """[turns + 1, S] float64: probability of reaching the goal."""
    answers: tuple[tuple[tuple[int, ...], ...], ...]
    """`answers[turns left - 1][cell]`: the best actions for the next answer."""


@lru_cache(maxsize=512)
def best_values(lake: Lake, turns: int, actions_per_turn: int) -> Values:
    """Values of the best player, who sees the lake after each answer but not between the actions of one answer.

    V_0 = [cell is the goal];  V_t = max over action sequences a_1..a_k, k <= actions_per_turn, of T_a1 ... T_ak V_{t-1}

    All 4 + 16 + ... sequences are tried, so `actions_per_turn` should be at most 5. Among equally good sequences the
    one that gets there sooner wins, so that the player never dawdles: the discounted value decides.
    """
    value, haste, moves = _goal(lake), _discounted(lake), lake.transitions()
    success, answers = [value], []
    for _ in range(turns):
        sequences: list[tuple[int, ...]] = [()]
        tails, hasty = value[None], _DISCOUNT * haste[None]
        all_sequences, all_values, all_haste = [], [], []
        for _ in range(actions_per_turn):
            sequences = [(action, *rest) for action in range(4) for rest in sequences]
            tails = np.concatenate([tails @ moves[action].T for action in range(4)])
            hasty = _DISCOUNT * np.concatenate([hasty @ moves[action].T for action in range(4)])
            hasty[:, lake.goal] = 1.0
            all_sequences += sequences
            all_values.append(tails)
            all_haste.append(hasty)
        candidates, speeds = np.concatenate(all_values), np.concatenate(all_haste)
        value = candidates.max(axis=0)
        # Rounding may part values that are equal; a billionth of success is no reason to dawdle.
        speeds = np.where(candidates >= value - 1e-9, speeds, -1.0)
        chosen = speeds.argmax(axis=0)
        haste = speeds.max(axis=0)
        success.append(value)
        answers.append(tuple(all_sequences[number] for number in chosen))
    return Values(np.stack(success), tuple(answers))


def best_answer(lake: Lake, cell: int, turns: int, actions_per_turn: int) -> tuple[int, ...]:
    """The best actions for the next answer at `cell` with `turns` left, this one included."""
    if lake.slippery:
        return best_values(lake, turns, actions_per_turn).answers[turns - 1][cell]
    single = best_values(lake, turns * actions_per_turn, 1)
    actions: list[int] = []
    while len(actions) < actions_per_turn and cell != lake.goal and cell not in lake.holes:
        actions.append(single.answers[turns * actions_per_turn - len(actions) - 1][cell][0])
        cell = lake.next_cell(cell, actions[-1], 0.0)
    return tuple(actions)


def best_success(lake: Lake, turns: int, actions_per_turn: int) -> float:
    """Probability that the best player reaches the goal from the start."""
    if lake.slippery:
        return float(best_values(lake, turns, actions_per_turn).success[turns, lake.start])
    return float(best_values(lake, turns * actions_per_turn, 1).success[-1, lake.start])


def random_success(lake: Lake, actions: int) -> float:
    """Probability that `actions` uniformly random actions reach the goal from the start."""
    value, mixed = _goal(lake), lake.transitions().mean(axis=0)
    for _ in range(actions):
        value = mixed @ value
    return float(value[lake.start])


def _goal(lake: Lake) -> np.ndarray:
    value = np.zeros(lake.size**2)
    value[lake.goal] = 1.0
    return value


def _discounted(lake: Lake) -> np.ndarray:
    """Discounted value [S] of the best player without a limit of turns: how near the goal is."""
    value, moves = _goal(lake), lake.transitions()
    for _ in range(4 * lake.size**2):
        value = _DISCOUNT * (moves @ value).max(axis=0)
        value[lake.goal] = 1.0
    return value
