"""Generates the tasks of a world."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from posttrain.seeds import random_stream
from posttrain_memory.worlds import clarification, filtering, retrieval, updates
from posttrain_memory.worlds.asking import TaskContext
from posttrain_memory.worlds.recipe import RewardWeights, WorldRecipe
from posttrain_memory.worlds.render import World
from posttrain_memory.worlds.rewards import score
from posttrain_memory.worlds.task import KINDS, VARIANTS, MemoryTask
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
