"""The task of an environment seed: generated in its own world, or a row of a file."""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from posttrain.data.examples import read_examples
from posttrain.data.held_out import TaskRow
from posttrain.data.problems import Problems
from posttrain.errors import InputError
from posttrain.recipe.data import ColumnsRecipe, TaskSourceRecipe
from posttrain.seeds import derive_seed, random_stream
from posttrain_memory.worlds.dataset import read_row
from posttrain_memory.worlds.generation import tasks_of
from posttrain_memory.worlds.published import is_published_row, read_memories, read_published_row
from posttrain_memory.worlds.recipe import WorldRecipe
from posttrain_memory.worlds.render import make_world
from posttrain_memory.worlds.task import KINDS, MemoryTask

_WORLDS = 20
"""Number of worlds to try before giving up on a task."""
_FEW_VAULTS = 20
"""Below this number of vaults, tasks of one vault may be trained on and held out."""


@dataclass(frozen=True)
class Assignment:
    """A task and its initial vault (path -> text), which must not be modified."""

    task: MemoryTask
    files: dict[str, str]


def generated_task(recipe: WorldRecipe, seed: int) -> Assignment:
    """The generated task of `seed`, in a world that no other seed has. Its kind is drawn in proportion to the numbers
    of tasks in `recipe`.

    Raises InputError if no world has room for a task.
    """
    return _generated_task(recipe.model_dump_json(), seed)


@lru_cache(maxsize=4096)
def _generated_task(key: str, seed: int) -> Assignment:
    recipe = WorldRecipe.model_validate_json(key)
    counts = {kind: getattr(recipe, kind) for kind in KINDS if getattr(recipe, kind)}
    if not counts:
        raise InputError("environment.worlds has no tasks; set `retrieval`, `update`, `clarification` or `filter`")
    for attempt in range(_WORLDS):
        random = random_stream("memory environment", seed, attempt)
        weights = [count / sum(counts.values()) for count in counts.values()]
        kind = str(random.choice(list(counts), p=weights))
        one = recipe.model_copy(update={name: int(name == kind) for name in KINDS})
        world = make_world(derive_seed("memory environment", seed, attempt), one)
        tasks = tasks_of(world, one)
        if tasks:
            return Assignment(tasks[0], dict(world.files))
    raise InputError("environment.worlds has no room for any task; allow more notes, facts or variants")


@dataclass(frozen=True)
class TaskTable:
    """The rows that are tasks, in order, and the problems of the others."""

    rows: list[Assignment]
    tasks: list[TaskRow]
    """What each row is for, and the text by which rows are divided: that of its vault, or that of its question and its
    vault where there are fewer than 20 vaults."""
    problems: Problems


_reading = Lock()


def task_table(sources: list[TaskSourceRecipe], memories: str | None, judged: bool = False) -> TaskTable:
    """The tasks of `sources`, read once per process.

    `memories` is a folder with the vaults of records that refer to them by name. Updates in the published format are
    tasks only if they are `judged`. Raises InputError if there are no tasks.
    """
    # Environments run in threads; one reads while the others wait.
    with _reading:
        return _task_table(json.dumps([source.model_dump() for source in sources]), memories, judged)


@lru_cache(maxsize=16)
def _task_table(key: str, memories: str | None, judged: bool) -> TaskTable:
    sources = [TaskSourceRecipe.model_validate(values) for values in json.loads(key)]
    vaults = read_memories(Path(memories)) if memories is not None else {}
    problems, rows = Problems(), []
    uses = []
    for source in sources:
        for prompt in read_examples("prompt", [source], ColumnsRecipe(), problems):
            try:
                rows.append(_of_row(prompt.row, vaults, judged))
                uses.append(source.use)
            except InputError as error:
                problems.used -= 1
                problems.add("no memory task", prompt.origin, str(error))
    if not rows:
        problems.require_any(", ".join(source.path for source in sources))
    texts = [json.dumps(row.files, sort_keys=True) for row in rows]
    if len(set(texts)) < _FEW_VAULTS:
        texts = [f"{row.task.question} {text}" for row, text in zip(rows, texts, strict=True)]
    return TaskTable(rows, [TaskRow(text, use) for text, use in zip(texts, uses, strict=True)], problems)


def _of_row(row: dict[str, Any], vaults: dict[str, dict[str, str]], judged: bool) -> Assignment:
    if not is_published_row(row):
        return Assignment(*read_row(row))
    task, files = read_published_row(row, vaults)
    if "judge" in task.truth and not judged:
        raise InputError("an update in the published format can only be scored by a judge; set environment.judge")
    return Assignment(task, files)
