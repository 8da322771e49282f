"""What a paired test of held-out items can show: the smallest change that it finds in 80% of cases, and the fewest items."""

import math
from collections.abc import Callable

LEVEL, POWER = 0.05, 0.8
"""Of two-sided tests, and of what they are said to show."""
FEWEST = 6
"""The fewest items that can show a change: if n items all change alike, p = 2^(1-n), for McNemar's test and for `t_test`."""


def smallest(power: Callable[[float], float], most: float) -> float:
    """The smallest change whose `power`, which rises with it, is `POWER`; infinite if `most` has less."""
    low, high = 0.0, most
    if power(high) < POWER:
        return math.inf
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle) >= POWER else (middle, high)
    return high


def mcnemar_power(gained: float, lost: float, items: int, level: float = LEVEL) -> float:
    """Probability that McNemar's exact test finds more items gained than lost. Exact.

    `gained`, `lost`: probabilities that an item is right only after the change, and only before it.
    """
    import numpy as np
    from scipy.special import bdtr, bdtrik

    if gained <= 0:
        return 0.0
    share = min(1.0, gained + lost)
    width = 9 * math.sqrt(items * share * (1 - share)) + 9  # fewer or more items differ in less than one case in 1e15
    differing = np.arange(max(1, int(items * share - width)), min(items, int(items * share + width)) + 1)
    chance = np.diff(bdtr(np.arange(differing[0] - 1, differing[-1] + 1), items, share))
    # The largest number of losses whose p-value, twice the probability of at most as many, is below the level.
    most = np.ceil(bdtrik(level / 2, differing, 0.5))
    reached = bdtr(np.maximum(most - 1, 0), differing, 0.5) >= level / 2
    most = np.where(reached, np.maximum(most - 1, 0), most) - 1
    found = np.where(most < 0, 0.0, bdtr(np.maximum(most, 0), differing, lost / (gained + lost)))
    return float(chance @ found)


def t_shown(freedom: float, level: float = LEVEL) -> float:
    """The smallest difference, in standard errors, that a t-test with these degrees of freedom finds with `POWER`."""
    from scipy.special import nctdtr, stdtrit

    limit = float(stdtrit(freedom, 1 - level / 2))
    return smallest(lambda shift: 1 - float(nctdtr(freedom, shift, limit)), 4 * limit + 10)


def points_shown(items: int, episodes: int = 1) -> float:
    """The smallest change of a success rate that a run's verdict finds with `POWER`, in [0, 1]; infinite below `FEWEST` items.

    For independent answers with rates around 1/2, before and after, which differ in the most items: tasks of different
    difficulty show smaller changes. The test is McNemar's, and with several `episodes` per item, Student's.
    """
    if items < FEWEST:
        return math.inf
    if episodes == 1:
        return smallest(lambda change: mcnemar_power(((1 + change) / 2) ** 2, ((1 - change) / 2) ** 2, items), 1.0)
    errors = t_shown(items - 1)
    # The variance of an item's change is (1 - change^2) / (2 episodes).
    return errors / math.sqrt(2 * episodes * items + errors**2)


def deviations_shown(items: int) -> float:
    """The smallest change of another measure that a run's verdict finds with `POWER`, in standard deviations of the changes of
    the items; infinite below `FEWEST` items."""
    return t_shown(items - 1) / math.sqrt(items) if items >= FEWEST else math.inf


def shown(items: int, episodes: int = 1, kind: str | None = None, item: str = "task") -> str:
    """What `items` show, in words, rounded up; `kind`: `rate` for success alone, another for other measures, None for both."""
    if items < FEWEST:
        return f"{items} {item}{'s' * (items != 1)} cannot show any change; {FEWEST} or more can"
    changes = []
    if kind in (None, "rate"):
        changes.append(f"{math.ceil(100 * points_shown(items, episodes) - 1e-6)} points of success")
    if kind != "rate":
        changes.append(
            f"{math.ceil(100 * deviations_shown(items) - 1e-6) / 100:.2f} standard deviations of the changes"
        )
    return f"{items} {item}s show changes from {' or '.join(changes)}, in 80% of runs"
