"""Tasks as rows of a data set, with disjoint worlds for training, development and test and no duplicate questions."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.errors import InputError
from posttrain.seeds import derive_seed
from posttrain_memory.worlds.generation import question_key, tasks_of
from posttrain_memory.worlds.recipe import WorldRecipe
from posttrain_memory.worlds.render import World, make_world
from posttrain_memory.worlds.task import MemoryTask, task_of

SPLITS = ("test", "dev", "train")
"""In the order in which worlds are drawn: adding training worlds does not change the other splits."""


@dataclass(frozen=True)
class Sample:
    """A task, its world, and its split."""

    split: str
    world: World
    task: MemoryTask
    recipe: WorldRecipe


def samples(seed: int, recipe: WorldRecipe, worlds: Mapping[str, int]) -> Iterator[Sample]:
    """The tasks of `worlds[split]` worlds for each split. All titles of worlds and all questions of tasks differ."""
    titles: set[str] = set()
    asked: set[str] = set()
    for split in SPLITS:
        count = number = 0
        while count < worlds.get(split, 0):
            world = make_world(derive_seed("memory worlds", seed, split, number), recipe)
            number += 1
            if world.graph.title in titles:
                continue
            titles.add(world.graph.title)
            count += 1
            for task in tasks_of(world, recipe):
                if question_key(task) not in asked:
                    asked.add(question_key(task))
                    yield Sample(split, world, task, recipe)


def row_of(sample: Sample) -> dict[str, Any]:
    """The record of a sample: messages, label, vault, and columns for selection.

    `label` is JSON with everything needed to score an episode (`task`) and to regenerate the world (`world`, its
    seed, and `recipe`).
    """
    task, world = sample.task, sample.world
    label = {
        "task": task.to_record(),
        "world": world.seed,
        "recipe": sample.recipe.model_dump(mode="json", exclude_defaults=True),
    }
    return {
        "context_messages": [{"role": "user", "content": task.question}],
        "label": json.dumps(label, ensure_ascii=False),
        "files": [{"path": path, "content": text} for path, text in sorted(world.files.items())],
        "kind": task.kind,
        "variant": task.variant,
        "hops": task.hops,
        "theme": task.theme,
        "world": world.seed,
        "solution": task.solution,
    }


def read_row(row: Mapping[str, Any]) -> tuple[MemoryTask, dict[str, str]]:
    """The task of a record and its initial vault. Without `files`, the world is regenerated from the label.

    Raises InputError if `row_of` did not write the record.
    """
    try:
        label = json.loads(row["label"])
        task = task_of(label["task"])
        if row.get("files"):
            return task, {file["path"]: file["content"] for file in row["files"]}
        return task, dict(make_world(label["world"], WorldRecipe(**label["recipe"])).files)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"a record has no valid label of a memory task ({error}); write records with `posttrain data worlds`"
        ) from error
