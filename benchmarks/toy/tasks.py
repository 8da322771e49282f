"""Tasks of ten units with two choices each: every answer can be enumerated, so optimum and expectation are exact."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from posttrain.seeds import random_stream

UNITS, CHOICES = 10, 2
ANSWERS = np.array([[number >> unit & 1 for unit in range(UNITS)] for number in range(CHOICES**UNITS)])
"""[1024, K]: every answer, as the choice made in each unit."""
BEFORE = np.concatenate([np.zeros((len(ANSWERS), 1), int), ANSWERS[:, :-1]], axis=1)
"""[1024, K]: the choice before each unit, which the policy sees; 0 before the first."""
PAIRS = 15


@dataclass(frozen=True, eq=False)
class Task:
    """What answers are worth, to people and to the reward model alike: a unit alone, and two units together."""

    alone: np.ndarray
    """[K, C]"""
    together: np.ndarray
    """[K, C, K, C], nothing below the diagonal."""

    def worth(self, answers: np.ndarray, kept: np.ndarray | None = None) -> np.ndarray:
        """[N] float64 for answers [N, K]; of the units in `kept` [N, K] bool alone, where it is given."""
        there = np.eye(CHOICES)[answers]
        if kept is not None:
            there = there * kept[..., None]
        flat = there.reshape(len(answers), -1)
        size = UNITS * CHOICES
        return flat @ self.alone.ravel() + ((flat @ self.together.reshape(size, size)) * flat).sum(axis=1)

    @cached_property
    def every(self) -> np.ndarray:
        """[1024]: what each answer is worth."""
        return self.worth(ANSWERS)

    def score(self, expected: float) -> float:
        """0 for the policy that chooses at random, 1 for the best answer."""
        return float((expected - self.every.mean()) / (self.every.max() - self.every.mean()))


def additive(seed: int) -> Task:
    """Each choice has its own value, from a normal distribution."""
    draws = random_stream(seed, "toy", "additive")
    return Task(draws.normal(size=(UNITS, CHOICES)), _nothing())


def pairs(seed: int) -> Task:
    """Also, 15 pairs of choices are worth something together: by turns where both are made, and where either is."""
    draws = random_stream(seed, "toy", "pairs")
    alone, together = draws.normal(size=(UNITS, CHOICES)), _nothing()
    every = [(i, j) for i in range(UNITS) for j in range(i + 1, UNITS)]
    for number, chosen in enumerate(draws.choice(len(every), PAIRS, replace=False).tolist()):
        (i, j), (a, b) = every[chosen], draws.integers(0, CHOICES, size=2).tolist()
        worth = float(draws.normal())
        if number % 2:
            alone[i, a] += worth
            alone[j, b] += worth
        together[i, a, j, b] += -worth if number % 2 else worth
    return Task(alone, together)


def late(seed: int) -> Task:
    """In the first five units the better choice costs 0.5 at once and earns 1 to 2 with the right choice five units on."""
    draws = random_stream(seed, "toy", "late")
    alone, together = 0.2 * draws.normal(size=(UNITS, CHOICES)), _nothing()
    for unit in range(UNITS // 2):
        better, answer = draws.integers(0, CHOICES, size=2).tolist()
        alone[unit, better] -= 0.5
        together[unit, better, unit + UNITS // 2, answer] += draws.uniform(1, 2)
    return Task(alone, together)


TASKS: dict[str, Callable[[int], Task]] = {"additive": additive, "pairs": pairs, "late": late}


def _nothing() -> np.ndarray:
    return np.zeros((UNITS, CHOICES, UNITS, CHOICES))


@dataclass(eq=False)
class Policy:
    """A softmax over the two choices of each unit, given the choice before: a table of logits."""

    logits: np.ndarray
    """[K, C before, C]"""

    @classmethod
    def uniform(cls) -> "Policy":
        return cls(np.zeros((UNITS, CHOICES, CHOICES)))

    @property
    def chances(self) -> np.ndarray:
        """[K, C before, C]"""
        odds = np.exp(self.logits - self.logits.max(axis=-1, keepdims=True))
        return odds / odds.sum(axis=-1, keepdims=True)

    def of_every_answer(self) -> np.ndarray:
        """[1024]: the chance of each answer."""
        return self.chances[np.arange(UNITS), BEFORE, ANSWERS].prod(axis=1)

    def sample(self, count: int, draws: np.random.Generator) -> np.ndarray:
        """[N, K]: answers."""
        chances, luck = self.chances[..., 1], draws.random((UNITS, count))
        answers, before = np.zeros((count, UNITS), int), np.zeros(count, int)
        for unit in range(UNITS):
            before = answers[:, unit] = (luck[unit] < chances[unit, before]).astype(int)
        return answers

    def climb(self, answers: np.ndarray, advantages: np.ndarray, rate: float) -> None:
        """One step of REINFORCE: `advantages` [N, K], summed over units and weighed over answers as they are given."""
        before = np.concatenate([np.zeros((len(answers), 1), int), answers[:, :-1]], axis=1)
        units, chances = np.arange(UNITS), self.chances
        change = np.zeros_like(self.logits)
        np.add.at(change, (units, before, answers), advantages)
        np.add.at(change, (units, before), -advantages[..., None] * chances[units, before])
        self.logits += rate * change
