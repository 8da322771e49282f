"""The tasks of a world."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from posttrain.seeds import random_stream
from posttrain_memory.worlds import clarification, filtering, retrieval, updates
from posttrain_memory.worlds.asking import Asker
from posttrain_memory.worlds.recipe import RewardWeights, WorldRecipe
from posttrain_memory.worlds.render import World
from posttrain_memory.worlds.rewards import score
from posttrain_memory.worlds.task import KINDS, VARIANTS, MemoryTask
from posttrain_memory.worlds.updates import follow_up
from posttrain_memory.worlds.values import shuffled

Maker = Callable[[Asker], MemoryTask | None]
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
"""How often a variant may fail, or ask what was asked before, until another is taken."""


def tasks_of(world: World, recipe: WorldRecipe) -> list[MemoryTask]:
    """The tasks of a world, in the numbers of the recipe as far as the world has room; no question twice.

    Variants of a kind take turns. The same world and recipe give the same tasks.
    """
    tasks: list[MemoryTask] = []
    asked: set[str] = set()
    for kind in KINDS:
        wanted = [v for v in VARIANTS[kind] if not recipe.variants or v in recipe.variants]
        made, number = 0, 0
        order = shuffled(random_stream("memory tasks", world.seed, kind), wanted)
        while order and made < getattr(recipe, kind):
            variant = order[0]
            task = None
            for _ in range(_TRIES):
                number += 1
                asker = Asker(world, random_stream("memory tasks", world.seed, kind, number))
                task = MAKERS[variant](asker)
                if task is not None and not asked & {identity(task), _subject(task)} and _sound(task, world):
                    break
                task = None
            if task is None:
                order = order[1:]
                continue
            asked |= {identity(task), _subject(task)}
            if kind == "update":
                after = Asker(world, random_stream("memory follow-up", world.seed, number))
                task = replace(task, follow_up=follow_up(task, after))
            tasks.append(task)
            made += 1
            order = [*order[1:], variant]
    return tasks


def identity(task: MemoryTask) -> str:
    """What makes a question the same as another: its words without case."""
    return " ".join(task.question.casefold().split())


def _subject(task: MemoryTask) -> str:
    """What a task is about: within a world, the same is not asked or told twice in other words."""
    truth = dict(task.truth)
    change = truth.pop("change", {})
    what = {key: value for key, value in change.items() if key not in ("value", "facts")}
    if task.variant == "aggregate":
        # Two sums or extremes may come to the same.
        truth["solution"] = task.solution
    return json.dumps([task.kind, truth, what], sort_keys=True)


def _sound(task: MemoryTask, world: World) -> bool:
    """Whether the reply of the solution succeeds where nothing has to be changed.

    A value may happen to be a word of the reply or of another value; such a task would be scored wrongly.
    """
    if task.kind == "update":
        return True
    return score(task, world.files, world.files, task.reply, task.asks, 1, RewardWeights()).success
