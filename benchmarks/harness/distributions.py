"""Distributions of returns, scores and success rates whose mean is known."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from posttrain.seeds import random_stream

Draws = np.random.Generator


@dataclass(frozen=True)
class Values:
    """A distribution of returns or scores."""

    draw: Callable[[Draws, Any], np.ndarray]
    truth: float
    bounds: tuple[float, float] | None = None
    """The range of the values, which rows of known range use."""


def levels(values: Sequence[float], chances: Sequence[float]) -> Values:
    return Values(
        lambda draws, n: draws.choice(values, n, p=chances), float(np.dot(values, chances)), (min(values), max(values))
    )


def beta(a: float, b: float) -> Values:
    return Values(lambda draws, n: draws.beta(a, b, n), a / (a + b), (0.0, 1.0))


def bonus(chance: float) -> Values:
    return Values(lambda draws, n: draws.normal(0, 0.1, n) + (draws.random(n) < chance), chance)


def often_zero(chance: float) -> Values:
    return Values(lambda draws, n: draws.exponential(1, n) * (draws.random(n) < chance), chance)


VALUES = {
    "normal": Values(lambda draws, n: draws.normal(1, 1, n), 1.0),
    "Laplace": Values(lambda draws, n: draws.laplace(0, 1, n), 0.0),
    "Student's t of 3": Values(lambda draws, n: draws.standard_t(3, n), 0.0),
    "exponential": Values(lambda draws, n: draws.exponential(1, n), 1.0),
    "gamma of 2": Values(lambda draws, n: draws.gamma(2, 1, n), 2.0),
    "gamma of 0.5": Values(lambda draws, n: draws.gamma(0.5, 1, n), 0.5),
    "log-normal of 0.5": Values(lambda draws, n: draws.lognormal(0, 0.5, n), math.exp(0.125)),
    "Poisson of 2": Values(lambda draws, n: draws.poisson(2, n).astype(float), 2.0),
    "half zero, half exponential": often_zero(0.5),
    "80% zero, 20% exponential": often_zero(0.2),
    "two modes": Values(lambda draws, n: draws.normal(0, 0.1, n) + draws.integers(0, 2, n), 0.5),
    "noise and 1 in 20%": bonus(0.2),
    "noise and 1 in 10%": bonus(0.1),
    "noise and 1 in 5%": bonus(0.05),
    "noise in [0, 1] and 1 in 5%": Values(
        lambda draws, n: np.where(draws.random(n) < 0.05, 1.0, draws.beta(2, 20, n)), 0.05 + 0.95 * 2 / 22, (0.0, 1.0)
    ),
    "uniform": beta(1, 1),
    "beta of 8, 1": beta(8, 1),
    "beta of 0.5, 0.5": beta(0.5, 0.5),
    "beta of 0.2, 2": beta(0.2, 2),
    "0 or 1, 1%": levels((0.0, 1.0), (0.99, 0.01)),
    "0 or 1, 2%": levels((0.0, 1.0), (0.98, 0.02)),
    "0 or 1, 5%": levels((0.0, 1.0), (0.95, 0.05)),
    "0 or 1, 50%": levels((0.0, 1.0), (0.5, 0.5)),
    "0 70%, 0.5 20%, 1 10%": levels((0.0, 0.5, 1.0), (0.7, 0.2, 0.1)),
    "-0.1 30%, 0 60%, 1 10%": levels((-0.1, 0.0, 1.0), (0.3, 0.6, 0.1)),
    "0 60%, 0.1 30%, 1 10%": levels((0.0, 0.1, 1.0), (0.6, 0.3, 0.1)),
    "-5 5%, 0 45%, 1 50%": levels((-5.0, 0.0, 1.0), (0.05, 0.45, 0.5)),
    "0 50%, 1 45%, 10 5%": levels((0.0, 1.0, 10.0), (0.5, 0.45, 0.05)),
    "1 to 5": levels((1.0, 2.0, 3.0, 4.0, 5.0), (0.05, 0.1, 0.2, 0.35, 0.3)),
    "tenths of 1, alike": levels([k / 10 for k in range(11)], [1 / 11] * 11),
    "tenths of 1, most 0": levels([k / 10 for k in range(11)], [0.5 ** min(k + 1, 10) for k in range(11)]),
    "Sokoban, 10% solved": Values(
        lambda draws, n: np.where(draws.random(n) < 0.1, 10.9 - 0.1 * draws.integers(3, 6, n), -0.5),
        0.1 * 10.5 - 0.45,
        (-1.0, 10.9),
    ),
}
RARE = {
    "log-normal of 1": Values(lambda draws, n: draws.lognormal(0, 1, n), math.exp(0.5)),
    "noise and 1 in 2%": bonus(0.02),
    "-0.1 30%, 0 68%, 1 2%": levels((-0.1, 0.0, 1.0), (0.3, 0.68, 0.02)),
    "-5 1%, 0 49%, 1 50%": levels((-5.0, 0.0, 1.0), (0.01, 0.49, 0.5)),
}
"""Values that fewer than 1 in 20 have decide, of which a sample of 64 may have none."""


def modes(low: float, high: float, share: float, spread: float) -> Values:
    """Runs that fail with probability `share`, around `low`, and runs that learn, around `high`."""

    def draw(draws: Draws, n: Any) -> np.ndarray:
        return np.clip(draws.normal(np.where(draws.random(n) < share, low, high), spread), 0, 1)

    # Clipping moves the mean of normal values; that of a million draws is off by less than 0.0005.
    return Values(draw, float(draw(random_stream("intervals", "modes"), 1_000_000).mean()))


def measured(episodes: int, values: Values) -> Values:
    return Values(lambda draws, n: draws.binomial(episodes, values.draw(draws, n)) / episodes, values.truth)


@cache
def success_rates() -> dict[str, Values]:
    """Success rates of training runs."""
    return {
        "normal, 70% ± 5": modes(0.7, 0.7, 0, 0.05),
        "normal, 50% ± 15": modes(0.5, 0.5, 0, 0.15),
        "normal, 90% ± 3": modes(0.9, 0.9, 0, 0.03),
        "beta of 4, 1": beta(4, 1),
        "beta of 8, 1": beta(8, 1),
        "beta of 20, 1": beta(20, 1),
        "beta of 20, 2": beta(20, 2),
        "beta of 1, 8": beta(1, 8),
        "beta of 2, 2": beta(2, 2),
        "uniform": beta(1, 1),
        "beta of 0.5, 0.5": beta(0.5, 0.5),
        "beta of 20, 1, measured on 64 tasks": measured(64, beta(20, 1)),
        "98%, measured on 64 tasks": measured(64, modes(0.98, 0.98, 0, 0)),
        "99.5%, measured on 256 tasks": measured(256, modes(0.995, 0.995, 0, 0)),
        "half at 5%, half at 95%": modes(0.05, 0.95, 0.5, 0.03),
        "half at 30%, half at 90%": modes(0.3, 0.9, 0.5, 0.03),
        "half at 10%, half at 90%, ± 10": modes(0.1, 0.9, 0.5, 0.1),
        "half at 60%, half at 80%, ± 5": modes(0.6, 0.8, 0.5, 0.05),
        "30% fail": modes(0.05, 0.95, 0.3, 0.03),
        "10% fail": modes(0.05, 0.95, 0.1, 0.03),
    }
