"""A cost against a size, and how fast it grows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

TOLERANCE = 0.2
"""Of exponents of seconds: caches fill, and others use the machine. Counts and bytes are held to less."""


@dataclass
class Series:
    """Costs y at sizes x; the cost is to grow as x to the power of `expected` at most."""

    part: str
    """engine or learner."""
    size: str
    """What x is."""
    cost: str
    """What y is, with its unit."""
    expected: float
    tolerance: float = TOLERANCE
    """By how much the fitted exponent may exceed the expected one."""
    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)

    def add(self, x: float, y: float) -> None:
        self.x.append(x)
        self.y.append(y)

    @property
    def exponent(self) -> float:
        """The fitted power."""
        return fitted_exponent(self.x, self.y)

    @property
    def verdict(self) -> str:
        """In words, whether the cost grows as slowly as it should."""
        fitted = self.exponent
        if math.isnan(fitted):
            return "too few points"
        return "as it must" if fitted <= self.expected + self.tolerance else "faster than it must"


def fitted_exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Slope of the least-squares line through log y over log x; NaN for fewer than two different sizes."""
    if len(set(x)) < 2 or min(y) <= 0:
        return math.nan
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
