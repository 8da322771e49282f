"""The task of an environment seed: generated in its own world, or a row of a file."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

from posttrain.data.examples import read_examples
from posttrain.data.held_out import TaskRow
from posttrain.data.problems import Problems
from posttrain.errors import InputError
from posttrain.recipe.data import ColumnsRecipe, TaskSourceRecipe
from posttrain.seeds import derive_seed, random_stream
from posttrain_memory.recipe import MemoryRecipe
from posttrain_memory.vault.limits import VaultError, VaultLimits
from posttrain_memory.vault.storage import MemoryStorage
from posttrain_memory.vault.vault import Vault
from posttrain_memory.worlds.generation import read_row, tasks_of
from posttrain_memory.worlds.recipe import WorldRecipe
from posttrain_memory.worlds.records import (
    Memories,
    accepted,
    is_evaluation,
    is_published_row,
    read_evaluation,
    read_folder,
    read_item,
    read_memories,
    read_published_row,
)
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
    """The generated task of `seed`, in its own world. Kinds are drawn in proportion to their numbers in `recipe`.

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
    renamed: list[str]
    """Notes whose path in the files a vault does not accept, as `FILE: old -> new`."""


_reading = Lock()


def task_table(recipe: MemoryRecipe) -> TaskTable:
    """The tasks of `environment.tasks`, read once per process. Raises InputError if there are none."""
    # Environments run in threads; one reads while the others wait.
    with _reading:
        decided = recipe.judge_decides if recipe.judge is not None else []
        sources = json.dumps([source.model_dump() for source in recipe.tasks])
        return _task_table(sources, recipe.memories, frozenset(decided), recipe.vault.model_dump_json())


@lru_cache(maxsize=16)
def _task_table(key: str, folder: str | None, decided: frozenset[str], limits: str) -> TaskTable:
    sources = [TaskSourceRecipe.model_validate(values) for values in json.loads(key)]
    memories = read_memories(Path(folder)) if folder is not None else Memories({}, [])
    problems, renamed = Problems(), list(memories.renamed)
    found: list[tuple[Assignment, Any, str]] = []
    for source in sources:
        if is_evaluation(Path(source.path)):
            items = _evaluation_items(Path(source.path), decided, renamed)
        else:
            prompts = read_examples("prompt", [source], ColumnsRecipe(), problems)
            items = ((prompt.origin, partial(_row_task, prompt.row, memories.vaults, decided)) for prompt in prompts)
        for origin, read in items:
            try:
                row = read()
                Vault(MemoryStorage(row.files), VaultLimits.model_validate_json(limits)).files()
            except (InputError, VaultError) as error:
                kind = "notes that a vault refuses: " if isinstance(error, VaultError) else ""
                problems.add_text(f"{kind}{error}", origin)
                continue
            found.append((row, source.use, origin))
    problems.used = len(found)
    if not found:
        problems.require_any(", ".join(source.path for source in sources))
    texts = [json.dumps(row.files, sort_keys=True) for row, *_ in found]
    if len(set(texts)) < _FEW_VAULTS:
        texts = [f"{row.task.question} {text}" for (row, *_), text in zip(found, texts, strict=True)]
    tasks = [TaskRow(text, use, row.task.kind, at) for text, (row, use, at) in zip(texts, found, strict=True)]
    return TaskTable([row for row, *_ in found], tasks, problems, renamed)


def _evaluation_items(
    folder: Path, decided: frozenset[str], renamed: list[str]
) -> Iterator[tuple[str, Callable[[], Assignment]]]:
    """The origin of each evaluation item below `folder`, and a function that returns its task. Adds renamed notes to `renamed`."""
    vaults: dict[Path, dict[str, str]] = {}

    def read(line: str, kind: str, place: Path) -> Assignment:
        if place not in vaults:
            vaults[place], changed = accepted(read_folder(place))
            renamed.extend(f"{place}: {old} -> {new}" for old, new in changed.items())
        return Assignment(read_item(line, kind, vaults[place], decided), dict(vaults[place]))

    for origin, line, kind, place in read_evaluation(folder):
        yield origin, partial(read, line, kind, place)


def _row_task(row: dict[str, Any], vaults: Mapping[str, dict[str, str]], decided: frozenset[str]) -> Assignment:
    return Assignment(*(read_published_row(row, vaults, decided) if is_published_row(row) else read_row(row)))
