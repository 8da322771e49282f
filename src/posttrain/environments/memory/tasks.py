"""Which task an environment seed is: one of a made-up world of its own, or a row of a file."""

from dataclasses import dataclass
from functools import lru_cache

from posttrain.environments.memory.worlds.recipe import WorldRecipe
from posttrain.environments.memory.worlds.render import make_world
from posttrain.environments.memory.worlds.task import KINDS, MemoryTask
from posttrain.environments.memory.worlds.tasks import tasks_of
from posttrain.errors import InputError
from posttrain.seeds import derive_seed, random_stream

_WORLDS = 20
"""Worlds that are tried until one has a place for a task."""


@dataclass(frozen=True)
class Assignment:
    """A task and the vault it begins with (path -> text), which nobody may change."""

    task: MemoryTask
    files: dict[str, str]


def made_up(recipe: WorldRecipe, seed: int) -> Assignment:
    """The task of `seed`: a kind, as often as its number of tasks says, in a world that no other seed has.

    InputError where no world has a place for any.
    """
    return _made_up(recipe.model_dump_json(), seed)


@lru_cache(maxsize=4096)
def _made_up(key: str, seed: int) -> Assignment:
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
    raise InputError(
        "environment.worlds makes worlds without a place for any task; allow more notes, facts or variants"
    )
