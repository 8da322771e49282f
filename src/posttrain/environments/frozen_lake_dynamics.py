"""Frozen lakes: random maps with the transition table of gymnasium's FrozenLake-v1, and optimal policies."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from posttrain.plugins import require_module
from posttrain.seeds import random_stream

DIRECTIONS = ("Left", "Down", "Right", "Up")
"""The actions in gymnasium's order."""


@dataclass(frozen=True, eq=False)
class Lake:
    """A lake with S = size * size cells, numbered row by row."""

    size: int
    slippery: bool
    start: int
    goal: int
    holes: frozenset[int]
    outcomes: tuple[tuple[tuple[tuple[float, int], ...], ...], ...]
    """`outcomes[cell][action]`: (probability, next cell) in gymnasium's order."""

    def transitions(self) -> np.ndarray:
        """Return the transition probabilities `[action, cell, next cell]`, [4, S, S] float64; holes and goal are
        absorbing.

        The matrix is not cached, because it would take most of the memory of the hundreds of lakes that are cached.
        """
        matrix = np.zeros((4, self.size**2, self.size**2))
        for cell, actions in enumerate(self.outcomes):
            for action, reached in enumerate(actions):
                for chance, following in reached:
                    matrix[action, cell, following] += chance
        return matrix

    def next_cell(self, cell: int, action: int, draw: float) -> int:
        """Return the cell that `action` leads to from `cell`; `draw` in [0, 1) selects the outcome."""
        reached = 0.0
        for probability, following in self.outcomes[cell][action]:
            reached += probability
            if draw < reached:
                return following
        return self.outcomes[cell][action][-1][1]


@lru_cache(maxsize=512)
def lake_of(seed: int, size: int, frozen: float, slippery: bool) -> Lake:
    """Return the lake of `seed`. Cells are ice with probability `frozen`; maps are redrawn until the goal is
    reachable."""
    draw = random_stream("frozen_lake", seed, "map")
    while True:
        ice = draw.random(size * size) < frozen
        start, goal = (int(cell) for cell in draw.choice(size * size, 2, replace=False))
        ice[[start, goal]] = True
        if _reachable(ice, size, start, goal):
            break
    holes = frozenset(np.flatnonzero(~ice).tolist())
    outcomes = tuple(
        (((1.0, cell),),) * 4 if cell == goal or cell in holes else moves
        for cell, moves in enumerate(_outcomes_on_ice(size, slippery))
    )
    return Lake(size, slippery, start, goal, holes, outcomes)


@lru_cache(maxsize=32)
def _outcomes_on_ice(size: int, slippery: bool) -> tuple[tuple[tuple[tuple[float, int], ...], ...], ...]:
    """Return `Lake.outcomes` of a lake without holes and goal. The table of gymnasium takes a millisecond to make."""
    rows = ["S" + "F" * (size - 1), *["F" * size] * (size - 1)]
    gymnasium = require_module("gymnasium.envs.toy_text.frozen_lake", "environment.type: frozen_lake")
    table = gymnasium.FrozenLakeEnv(desc=rows, is_slippery=slippery).P
    return tuple(
        tuple(tuple((float(chance), int(cell)) for chance, cell, *_ in table[state][action]) for action in range(4))
        for state in range(size * size)
    )


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
    """The optimal policy with 0, 1, ... turns left."""

    success: np.ndarray
    """[turns + 1, S] float64: probability of reaching the goal."""
    answers: tuple[tuple[tuple[int, ...], ...], ...]
    """`answers[turns left - 1][cell]`: the optimal actions of the next answer."""


@lru_cache(maxsize=512)
def best_values(lake: Lake, turns: int, actions_per_turn: int) -> Values:
    """Return the optimal values, where the policy observes the lake after each answer, not between its actions.

    V_0 = [cell is the goal];  V_t = max over action sequences a_1..a_k, k <= actions_per_turn, of T_a1 ... T_ak V_{t-1}

    All 4 + 16 + ... sequences are evaluated, so `actions_per_turn` should be at most 5. Among sequences of equal value
    the discounted value decides, so the policy takes the fastest one.
    """
    value, moves = _goal(lake), lake.transitions()
    discounted = value  # of the optimal policy without a limit of turns
    for _ in range(4 * lake.size**2):
        discounted = _DISCOUNT * (moves @ discounted).max(axis=0)
        discounted[lake.goal] = 1.0
    success, answers = [value], []
    for _ in range(turns):
        sequences: list[tuple[int, ...]] = [()]
        tails, discounted_tails = value[None], _DISCOUNT * discounted[None]
        all_sequences, all_values, all_discounted = [], [], []
        for _ in range(actions_per_turn):
            sequences = [(action, *rest) for action in range(4) for rest in sequences]
            tails = np.concatenate([tails @ moves[action].T for action in range(4)])
            discounted_tails = _DISCOUNT * np.concatenate([discounted_tails @ moves[action].T for action in range(4)])
            discounted_tails[:, lake.goal] = 1.0
            all_sequences += sequences
            all_values.append(tails)
            all_discounted.append(discounted_tails)
        candidates, speeds = np.concatenate(all_values), np.concatenate(all_discounted)
        value = candidates.max(axis=0)
        # The tolerance absorbs rounding differences between equal values.
        speeds = np.where(candidates >= value - 1e-9, speeds, -1.0)
        chosen = speeds.argmax(axis=0)
        discounted = speeds.max(axis=0)
        success.append(value)
        answers.append(tuple(all_sequences[number] for number in chosen))
    return Values(np.stack(success), tuple(answers))


def best_answer(lake: Lake, cell: int, turns: int, actions_per_turn: int) -> tuple[int, ...]:
    """Return the optimal actions of the next answer at `cell` with `turns` turns left, this one included."""
    if lake.slippery:
        return best_values(lake, turns, actions_per_turn).answers[turns - 1][cell]
    single = best_values(lake, turns * actions_per_turn, 1)
    actions: list[int] = []
    while len(actions) < actions_per_turn and cell != lake.goal and cell not in lake.holes:
        actions.append(single.answers[turns * actions_per_turn - len(actions) - 1][cell][0])
        cell = lake.next_cell(cell, actions[-1], 0.0)
    return tuple(actions)


def best_success(lake: Lake, turns: int, actions_per_turn: int) -> float:
    """Return the probability that the optimal policy reaches the goal from the start."""
    if lake.slippery:
        return float(best_values(lake, turns, actions_per_turn).success[turns, lake.start])
    return float(best_values(lake, turns * actions_per_turn, 1).success[-1, lake.start])


def random_success(lake: Lake, actions: int) -> float:
    """Return the probability that `actions` uniformly random actions reach the goal from the start."""
    value, mixed = _goal(lake), lake.transitions().mean(axis=0)
    for _ in range(actions):
        value = mixed @ value
    return float(value[lake.start])


def _goal(lake: Lake) -> np.ndarray:
    value = np.zeros(lake.size**2)
    value[lake.goal] = 1.0
    return value
