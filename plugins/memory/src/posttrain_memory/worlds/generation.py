"""Generates the tasks of a world, and rows of a data set with disjoint worlds for training, development and test and no duplicate
questions."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from posttrain.errors import InputError
from posttrain.seeds import derive_seed, random_stream
from posttrain_memory.worlds import clarification, filtering, retrieval, updates
from posttrain_memory.worlds.asking import TaskContext
from posttrain_memory.worlds.recipe import RewardWeights, WorldRecipe
from posttrain_memory.worlds.render import World, make_world
from posttrain_memory.worlds.rewards import score
from posttrain_memory.worlds.task import KINDS, VARIANTS, MemoryTask, task_of
from posttrain_memory.worlds.updates import follow_up
from posttrain_memory.worlds.values import shuffled

Maker = Callable[[TaskContext], MemoryTask | None]
MAKERS: dict[str, Maker] = {
    **{f"hop{hops}": partial(retrieval.fact, hops=hops) for hops in (0, 1, 2)},
    "aggregate": retrieval.aggregate,
    "time": retrieval.time,
    **{variant: partial(updates.fact_set, variant=variant) for variant in ("add", "change", "mention")},
    "delete": updates.fact_deleted,
    "new": updates.note_made,
    "remove": updates.note_removed,
    "relink": updates.relation_moved,
    "no_entity": clarification.no_entity,
    "no_attribute": clarification.no_attribute,
    "contradiction": clarification.contradiction,
    "control": clarification.control,
    **{variant: partial(filtering.filtered, variant=variant) for variant in VARIANTS["filter"]},
}
SPLITS = ("test", "dev", "train")
"""In the order in which worlds are drawn: adding training worlds does not change the other splits."""
_TRIES = 12
"""Number of attempts at a variant, which may fail or repeat a question, before another variant is used."""


def tasks_of(world: World, recipe: WorldRecipe) -> list[MemoryTask]:
    """The tasks of a world, in the numbers of the recipe as far as there is room. No question occurs twice.

    Variants of a kind alternate. The result is a function of the world and the recipe.
    """
    tasks: list[MemoryTask] = []
    asked: set[str] = set()
    for kind in KINDS:
        wanted = [v for v in VARIANTS[kind] if not recipe.variants or v in recipe.variants]
        count, number = 0, 0
        order = shuffled(random_stream("memory tasks", world.seed, kind), wanted)
        while order and count < getattr(recipe, kind):
            variant, *order = order
            for _ in range(_TRIES):
                number += 1
                context = TaskContext(world, random_stream("memory tasks", world.seed, kind, number))
                task = MAKERS[variant](context)
                keys = {question_key(task), _subject(task)} if task is not None else set()
                if task is None or asked & keys:
                    continue
                # A value may coincide with a word of the scripted reply or with another value.
                alone = (task, world.files, world.files, task.reply, task.asks, 1, RewardWeights())
                if kind != "update" and not score(*alone).success:
                    continue
                asked |= keys
                if kind == "update":
                    after = TaskContext(world, random_stream("memory follow-up", world.seed, number))
                    task = replace(task, follow_up=follow_up(task, after))
                tasks.append(task)
                count += 1
                order.append(variant)
                break
    return tasks


def question_key(task: MemoryTask) -> str:
    """The key by which questions are compared: the words without case."""
    return " ".join(task.question.casefold().split())


def _subject(task: MemoryTask) -> str:
    """The key of what a task is about: a world does not ask for or change a fact twice in other words."""
    truth = dict(task.truth)
    change = truth.pop("change", {})
    what = {key: value for key, value in change.items() if key not in ("value", "facts")}
    if task.variant == "aggregate":
        # Two sums or extremes may have the same value.
        truth["solution"] = task.solution
    return json.dumps([task.kind, truth, what], sort_keys=True)


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
        raise InputError(f"no valid label: {error}; write records with `posttrain data worlds`") from error
