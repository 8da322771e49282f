"""What is searched, as Optuna has it: a distribution for each name, and values to and from what its storage can hold."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from posttrain.errors import InputError
from posttrain.recipe.study import Range, choices_of
from posttrain.recipe.study_file import Point, Study, shown
from posttrain.seeds import random_stream

_MOST_TRIED = 32
"""Combinations that are resolved before a study begins."""


def distributions(study: Study) -> dict[str, BaseDistribution]:
    """Name -> its distribution, in the order of the file; those of groups are their values."""
    return {name: _distribution(values) for name, values in study.recipe.spaces.items()}


def stored(point: Point) -> dict[str, Any]:
    """`point` with values that a storage can hold: lists and sections as JSON text."""
    return {name: _stored(value) for name, value in point.items()}


def restored(study: Study, params: Point) -> dict[str, Any]:
    """The point that was `stored`."""
    values: dict[str, Any] = {}
    for name, value in params.items():
        choices = choices_of(study.recipe.spaces.get(name, []))
        values[name] = next((choice for choice in choices or [] if _stored(choice) == value), value)
    return values


def check_space(study: Study) -> list[str]:
    """A sentence for each value that makes no recipe with any of the combinations tried; `InputError` if none does.

    All combinations of choices and ends of ranges are tried, or a sample of them where they are many. A combination
    that makes no recipe is a failed trial; a study of which none does is a mistake in a key.
    """
    failed: dict[tuple[str, Any], str] = {}
    works: set[tuple[str, Any]] = set()
    first = ""
    for point in _corners(study):
        values = [(name, json.dumps(value)) for name, value in point.items()]
        try:
            study.at(point)
            works |= set(values)
        except InputError as error:
            first = first or str(error)
            for value in values:
                failed.setdefault(value, str(error).splitlines()[0])
    if not works:
        raise InputError(first)
    never = [value for value in failed if value not in works]
    return [f"{name} = {shown(json.loads(value))} makes no recipe: {failed[name, value]}" for name, value in never]


def _corners(study: Study) -> Iterator[dict[str, Any]]:
    """Points at the ends of ranges and at the choices; of groups, each value beside the first ones of the others."""
    sides = {name: _ends(values) for name, values in study.recipe.spaces.items()}
    count = 1
    for side in sides.values():
        count *= len(side)
    if count <= _MOST_TRIED:
        yield from (dict(zip(sides, values, strict=True)) for values in itertools.product(*sides.values()))
        return
    middle = {name: side[0] for name, side in sides.items()}
    yield from (middle | {name: value} for name, side in sides.items() for value in side)
    draw = random_stream(study.recipe.sampler.seed, "corners")
    for _ in range(_MOST_TRIED):
        yield {name: side[int(draw.integers(len(side)))] for name, side in sides.items()}


def _ends(values: Any) -> list[Any]:
    if not isinstance(values, Range):
        return choices_of(values) or []
    return [int(values.low), int(values.high)] if values.int else [values.low, values.high]


def _distribution(values: Any) -> BaseDistribution:
    if not isinstance(values, Range):
        return CategoricalDistribution([_stored(choice) for choice in choices_of(values) or []])
    if values.int:
        return IntDistribution(int(values.low), int(values.high), log=values.log, step=int(values.step or 1))
    return FloatDistribution(values.low, values.high, log=values.log, step=values.step)


def _stored(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)
