"""Runs that differ by their seed alone, and the mean of their metrics with its interval over seeds."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from scipy.special import stdtrit

from posttrain.runs.panels import Series
from posttrain.runs.sources import Source

_OF_ONE_RUN = ("seed", "name", "runs")
"""Recipe keys that may differ between runs of one recipe."""


@dataclass(frozen=True)
class Bundle:
    """The runs behind one curve: those of one recipe with a seed each, or a single one."""

    label: str
    sources: tuple[Source, ...]

    @property
    def title(self) -> str:
        """The label, and over how many seeds a mean is."""
        return self.label if len(self.sources) == 1 else f"{self.label}, mean of n = {len(self.sources)} seeds"


@dataclass(frozen=True)
class Averaged:
    """Means over seeds and their 95% limits, at the steps that every seed has."""

    steps: list[int]
    values: list[float]
    low: list[float]
    high: list[float]


def bundles_of(sources: Sequence[Source]) -> tuple[list[Bundle], list[str]]:
    """One bundle for each recipe, in order of the first run of each, and what to say of it.

    Runs of one recipe with the same seed are the same run again: they are no sample over seeds, so such a recipe's runs
    stand by themselves.
    """
    by_recipe: dict[str, list[Source]] = {}
    for number, source in enumerate(sources):
        own = None if source.recipe is None else {k: v for k, v in source.recipe.items() if k not in _OF_ONE_RUN}
        key = f"run {number}" if own is None else json.dumps(own, sort_keys=True, default=str)
        by_recipe.setdefault(key, []).append(source)
    bundles: list[Bundle] = []
    notes = []
    for together in by_recipe.values():
        seeds = {source.seed for source in together}
        if len(together) > 1 and len(seeds) == len(together) and None not in seeds:
            bundles.append(Bundle(_label(together, bundles), tuple(together)))
            done = [source.steps for source in together]
            if len(set(done)) > 1:
                told = ", ".join(f"{source.name} {source.steps}" for source in together)
                notes.append(f"the mean over seeds is of the steps that all have; done are: {told}")
            continue
        if len(together) > 1:
            names = " and ".join(source.name for source in together)
            notes.append(f"{names} have one recipe and share a seed, so no mean over seeds is taken of them")
        bundles += [Bundle(source.name, (source,)) for source in together]
    return bundles, notes


def mean_over_seeds(series: Sequence[Series], geometric: bool = False) -> Averaged:
    """Mean and Student's t interval over two or more runs, mean ± t(0.975, n - 1) s / sqrt(n), at each common step.

    With `geometric`, of the logarithms of values, which must be above 0, and given back as values.
    """
    by_step = [dict(zip(one.steps, one.values, strict=True)) for one in series]
    steps = sorted(set.intersection(*(set(values) for values in by_step)))
    columns = [[math.log(values[step]) if geometric else values[step] for values in by_step] for step in steps]
    limits = [t_interval(column) for column in columns]
    means, low, high = ([math.exp(one[i]) if geometric else one[i] for one in limits] for i in range(3))
    return Averaged(steps, means, low, high)


def t_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95% interval by Student's t; NaN limits for fewer than two values."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return mean, math.nan, math.nan
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = float(stdtrit(n - 1, 0.975)) * spread / math.sqrt(n)
    return mean, mean - half, mean + half


def _label(together: Sequence[Source], others: Sequence[Bundle]) -> str:
    """What the names begin with alike, without a trailing `seed`; else the first name."""
    names = [source.name for source in together]
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    shared = "".join(letters[0] for letters in alike)
    if all(name[len(shared) :][:1] in tuple("0123456789") or name == shared for name in names):
        shared = shared.rstrip("0123456789")  # a digit that two numbers begin with is no part of the name
    shared = shared.rstrip("-_./ ")
    for word in ("seed", "s"):
        if shared.endswith((f"-{word}", f"_{word}", f".{word}", f"/{word}")):
            shared = shared[: -len(word) - 1]
    label = shared.rstrip("-_./ ") or together[0].name
    return together[0].name if label in {bundle.label for bundle in others} else label
