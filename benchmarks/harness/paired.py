"""Variants of a benchmark in its stored lines: means and paired differences over training seeds and tasks."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.crossed import crossed_mean
from posttrain.runs.intervals import Estimate, t_975

Line = dict[str, Any]
"""Results of a run: `variant`, `seed`, `final` [tasks] and `curve` [steps][tasks]."""

MOST_SEEDS = 200


def by_task(line: Line, key: str) -> list[float]:
    """Results [tasks] of a run: the final ones, or those of the learning curve (`curve`), as means over its steps."""
    values: list[float] = line[key] if key == "final" else np.mean(line["curve"], axis=0).tolist()
    return values


def results(lines: Sequence[Line], variant: str, key: str) -> dict[int, list[float]]:
    """Results [tasks] of the training seeds of a variant."""
    return {line["seed"]: by_task(line, key) for line in lines if line["variant"] == variant}


def difference(lines: Sequence[Line], variant: str, base: str, key: str) -> tuple[str, str]:
    """The difference of two variants, paired by training seed and task, and the number of seeds that would decide it."""
    one, other = (results(lines, name, key) for name in (variant, base))
    seeds = sorted(one.keys() & other.keys())
    if not seeds or variant == base:
        return "–", "–"
    table = np.array([one[seed] for seed in seeds]) - np.array([other[seed] for seed in seeds])
    found = crossed_mean(table)
    return shown(found), verdict(found, table.mean(axis=1).tolist())


def verdict(found: Estimate, differences: Sequence[float]) -> str:
    """`decided`, or the training seeds that would decide, given the mean and spread of those there are."""
    if found.low > 0 or found.high < 0:
        return "decided"
    needed = seeds_needed(differences)
    return "more tasks" if needed.isdigit() and int(needed) <= len(differences) else needed


def seeds_needed(differences: Any) -> str:
    """The fewest training seeds whose 95% interval would exclude 0, if their mean and deviation are those of `differences`."""
    if len(differences) < 2:
        return "–"
    mean, deviation = abs(float(np.mean(differences))), float(np.std(differences, ddof=1))
    enough = (n for n in range(2, MOST_SEEDS + 1) if t_975(n - 1) * deviation / n**0.5 < mean)
    return str(next(enough, f"more than {MOST_SEEDS}"))


def shown(found: Estimate) -> str:
    """In percent, with the limits if there are any."""
    limits = "" if np.isnan(found.low) else f" [{100 * found.low:.1f}, {100 * found.high:.1f}]"
    return f"{100 * found.value:.1f}%{limits}"


def overall(lines: Sequence[Line], variant: str, key: str) -> str:
    """The mean over training seeds and tasks."""
    found = results(lines, variant, key)
    return shown(crossed_mean([found[seed] for seed in sorted(found)], rate=True)) if found else "–"
