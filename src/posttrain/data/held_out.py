"""Division of tasks and rows into training, validation and test. Items with the same key stay in one part."""

import hashlib
import math
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.errors import InputError
from posttrain.recipe.plan import TaskSplit
from posttrain.recipe.rollout import CURVE, FINAL, EvaluationRecipe, SeedRange

_CURVE, _FINAL = "evaluation.seeds", "evaluation.final_seeds"
_MARKED = {_CURVE: "validation", _FINAL: "test"}


@dataclass(frozen=True)
class TaskRow:
    """A row of a file that is a task."""

    key: str
    """Text of the task. Tasks with the same text are never in different parts of a split."""
    use: Literal["training", "validation", "test"] = "training"
    """`use` of its source."""
    kind: str = ""
    """The kind of the task, if the environment has several."""
    origin: str = ""
    """Its file and row, such as `train.jsonl row 12`; empty if unknown, for example of a row of a package's data set."""


def listed_rows(rows: Sequence[TaskRow], seeds: Sequence[int]) -> str:
    """The rows that are the tasks of `seeds` (indices in `rows`), by file: ``12 of `train.jsonl` (rows 1-8, 11, 14-16)``."""
    numbers: dict[str, list[int]] = {}
    for seed in sorted(seeds):
        file, _, text = rows[seed].origin.rpartition(" row ")
        numbers.setdefault(file, []).append(int(text) if file and text.isdecimal() else seed)
    parts = []
    for file, listed in numbers.items():
        spans: list[list[int]] = []
        for number in sorted(listed):
            if spans and number == spans[-1][1] + 1:
                spans[-1][1] = number
            else:
                spans.append([number, number])
        shown = [f"{first}" if first == last else f"{first}-{last}" for first, last in spans[:_MOST_SPANS]]
        shown += ["..."] if len(spans) > _MOST_SPANS else []
        name = f"of `{file}` (rows" if file else "tasks (numbers"
        parts.append(f"{len(listed)} {name} {', '.join(shown)})")
    return "; ".join(parts)


_MOST_SPANS = 20
"""Longest list of consecutive row numbers in a report."""


def hash_order(keys: Iterable[str]) -> list[str]:
    """The distinct keys, ordered by their hashes. The relative order of two keys does not depend on other keys."""
    return sorted(set(keys), key=lambda key: hashlib.blake2b(key.encode("utf-8", "backslashreplace")).digest())


def divide(
    keys: Sequence[Any], order: Sequence[Hashable], validation: int, test: int
) -> tuple[list[int], list[int], list[int]]:
    """Divide items into training, validation and test parts; returns the indices of each, ascending.

    Validation takes whole groups of equal keys from the start of `order` until it has at least `validation` items, and
    test from the end until it has at least `test`, so the size of one part does not change the other.

    Args:
        keys: one key for each item.
        order: the distinct keys.
    """
    groups: dict[Hashable, list[int]] = {key: [] for key in order}
    for index, key in enumerate(keys):
        groups[key].append(index)
    remaining = list(order)
    parts: list[list[int]] = []
    for wanted, end in ((validation, 0), (test, -1)):
        part: list[int] = []
        while len(part) < wanted and remaining:
            part += groups[remaining.pop(end)]
        parts.append(sorted(part))
    return sorted(index for key in remaining for index in groups[key]), parts[0], parts[1]


def as_count(held_out: float, items: int) -> int:
    """`held_out`, a number (int) or a share (float) of `items`, as a number; at least 1."""
    return held_out if isinstance(held_out, int) else max(1, round(held_out * items))


def nothing_left(held_out: int, usable: int) -> str:
    """The error of `held_out` rows to hold out of `usable` ones."""
    return f"data.held_out: {held_out} rows would leave none of the {usable} usable rows to train on; hold out fewer"


def split_tasks(
    rows: Sequence[TaskRow] | None,
    source: str,
    evaluation: EvaluationRecipe,
    training: SeedRange | None,
    training_key: str = "seeds",
) -> TaskSplit:
    """Split tasks into those for training, for the learning curve, and for the final table.

    A range of seeds with a `start` is used unchanged. Other held-out tasks come from sources with `use: validation` and
    `use: test`. Without such sources, they are chosen from the remaining tasks in the order of hashes of their text,
    which depends on neither the run seed nor other rows.

    Args:
        rows: the rows that are tasks, in the order of their seeds; None if tasks are generated from seeds.
        source: the recipe key of the rows, for messages.
        training: None in a stage that only evaluates.

    Raises:
        InputError: a range has seeds without a row, or there are too few rows.
    """
    asked = {**({} if training is None else {training_key: training}), **evaluation.ranges}
    parts: dict[str, Sequence[int]] = {training_key: ()}
    if rows is None:
        if isinstance(evaluation.held_out, int | float):
            raise InputError(
                "evaluation.held_out divides tasks that are rows of files, and this environment generates its tasks; remove "
                "it, or set evaluation.seeds.count and evaluation.final_seeds.count"
            )
        parts |= {key: seeds.of_generated(key) for key, seeds in asked.items()}
        return TaskSplit(parts[training_key], parts[_CURVE], parts[_FINAL])
    given = {key: _given_rows(key, seeds, len(rows), source) for key, seeds in asked.items() if seeds.start is not None}
    taken = {index for part in given.values() for index in part}
    free = [index for index in range(len(rows)) if index not in taken]
    parts |= given
    wanted: dict[str, int | None] = {}
    for key, seeds in evaluation.ranges.items():
        marked = [index for index in free if rows[index].use == _MARKED[key]]
        if key in given:
            continue
        if marked:
            parts[key] = _drawn(rows, marked, seeds.count)
        elif evaluation.held_out != "all":
            wanted[key] = seeds.count
        else:
            everything = [index for index in free if rows[index].use == "training"]
            parts[key] = _drawn(rows, everything, seeds.count) if key == _FINAL else ()
    base = [index for index in free if rows[index].use == "training"]
    order = hash_order(rows[index].key for index in base)
    sizes = _sizes(len(base), evaluation, wanted)
    rest, curve, final = divide([rows[index].key for index in base], order, sizes[_CURVE], sizes[_FINAL])
    no_training = training is not None and training_key not in given and not rest
    if wanted and not base and training_key in given:
        raise InputError(
            f"{training_key} takes all {len(rows)} tasks of {source}, so none is left to hold out; leave {training_key} out, "
            f"lower {training_key}.count, or give evaluation.final_seeds.start as well"
        )
    if len(curve) < sizes[_CURVE] or len(final) < sizes[_FINAL] or no_training:
        raise InputError(
            f"{source} has {len(base)} tasks with {len(order)} different texts, too few to train on some and hold out "
            f"{sizes[_CURVE]} for the learning curve and {sizes[_FINAL]} for the final table; give it more rows, or lower "
            "evaluation.held_out, evaluation.seeds.count or evaluation.final_seeds.count"
        )
    drawn = {_CURVE: curve, _FINAL: final}
    parts |= {key: [base[place] for place in drawn[key]] for key in wanted}
    if training is not None and training_key not in given:
        parts[training_key] = _drawn(rows, [base[place] for place in rest], training.count)
    return TaskSplit(parts[training_key], parts[_CURVE], parts[_FINAL], source, source)


def training_tasks(
    rows: Sequence[TaskRow] | None, source: str, training: SeedRange, key: str, left_out: Container[str]
) -> Sequence[int]:
    """The tasks to train on if no task of this source is held out. Arguments as for `split_tasks`.

    `left_out`: texts of held-out tasks of another source; rows with such a text are not trained on.
    """
    if rows is None:
        return training.of_generated(key)
    if training.start is not None:
        return [i for i in _given_rows(key, training, len(rows), source) if rows[i].key not in left_out]
    pool = [i for i, row in enumerate(rows) if row.use == "training" and row.key not in left_out]
    return _drawn(rows, pool, training.count)


def _sizes(rows: int, evaluation: EvaluationRecipe, wanted: Mapping[str, int | None]) -> dict[str, int]:
    """How many of `rows` tasks to hold out for the curve and for the table: the numbers in `wanted`, or a default for
    None. A part that is not in `wanted` gets 0."""
    tenth = max(1, rows // 10)
    usual = {_CURVE: min(CURVE, tenth), _FINAL: min(FINAL, tenth)}
    if isinstance(evaluation.held_out, int | float) and wanted:
        count = as_count(evaluation.held_out, rows)
        curve = min(CURVE, math.ceil(count / 2)) if _FINAL in wanted else count
        curve = (wanted[_CURVE] or curve) if _CURVE in wanted else 0
        usual = {_CURVE: curve, _FINAL: max(1, count - curve)}
    return {key: (wanted[key] or usual[key]) if key in wanted else 0 for key in usual}


def _given_rows(key: str, seeds: SeedRange, rows: int, source: str) -> range:
    """The rows of a range with a start."""
    assert seeds.start is not None
    stop = rows if seeds.count is None else seeds.start + seeds.count
    if stop > rows or seeds.start >= stop:
        raise InputError(
            f"{key}: the last seed is {max(stop - 1, seeds.start)}, but {source} has {rows} usable rows, and a seed is a row "
            f"(0 to {rows - 1}); leave out `{key}` to have the rows divided, or set `{key}.start` and `{key}.count`"
        )
    return range(seeds.start, stop)


def _drawn(rows: Sequence[TaskRow], pool: Sequence[int], count: int | None) -> Sequence[int]:
    """At most `count` rows of the pool, ascending; all if `count` is None."""
    place = {text: number for number, text in enumerate(hash_order(rows[index].key for index in pool))}
    return sorted(sorted(pool, key=lambda index: place[rows[index].key])[:count])
