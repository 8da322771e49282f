"""The stages: built in, registered in this process, or added by plug-ins. A stage is the class of its recipe."""

import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, SerializeAsAny, ValidationInfo

from posttrain.plugins import Group, entry_points, load
from posttrain.recipe.base import unknown_kind, validated
from posttrain.recipe.distill import DistillRecipe
from posttrain.recipe.evaluate import EvaluateRecipe
from posttrain.recipe.generate import GenerateRecipe
from posttrain.recipe.rl import RlRecipe
from posttrain.recipe.run import StageRecipe
from posttrain.recipe.supervised import DpoRecipe, RewardRecipe, SftRecipe

_GROUP: Group = "posttrain.stages"
S = TypeVar("S", bound=type[StageRecipe])


class _Stages(dict[str, type[StageRecipe]]):
    """Name -> recipe. Iterates over the stages that are imported; looking up the name of a plug-in imports it."""

    def __missing__(self, name: str) -> type[StageRecipe]:
        if name not in entry_points(_GROUP):
            raise KeyError(name)
        register_stage(load(_GROUP, name))
        return self[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in entry_points(_GROUP)

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


STAGES = _Stages()
"""Name of a stage -> schema of its recipe."""


def register_stage(recipe: S) -> S:
    """Class decorator that adds a stage.

        @posttrain.register_stage
        class MergeRecipe(posttrain.StageRecipe):
            stage: Literal["merge"] = "merge"

            def run(self, directory, *, resume, overwrite, console, callbacks): ...

    A distribution adds the class by an entry point of the group `posttrain.stages`. `posttrain merge` and
    `posttrain.run("merge", ...)` run it.

    Raises:
        ValueError: `stage` is not the name of a new stage.
    """
    fields: Mapping[str, Any] = recipe.model_fields  # type: ignore[call-overload]
    names = typing.get_args(fields["stage"].annotation) if "stage" in fields else ()
    if len(names) != 1:
        raise ValueError(f"{recipe.__name__} needs a field `stage: Literal[NAME] = NAME`, the name of the stage")
    if names[0] in _BUILT_IN:
        raise ValueError(f"there is a built-in stage {names[0]!r}; register yours under another name")
    STAGES[names[0]] = recipe
    return recipe


_BUILT_IN: tuple[str, ...] = ()
for _recipe in (RlRecipe, DistillRecipe, SftRecipe, RewardRecipe, DpoRecipe, EvaluateRecipe, GenerateRecipe):
    register_stage(_recipe)
_BUILT_IN = tuple(STAGES)


def _by_stage(value: Any, info: ValidationInfo) -> Any:
    """The typed recipe of a mapping; for pydantic. Anything else is returned unchanged."""
    if not isinstance(value, Mapping):
        return value
    stage = str(value.get("stage"))
    if stage not in STAGES:
        raise unknown_kind("stage", stage, STAGES)
    return validated(STAGES[stage], value, info)


Recipe = Annotated[SerializeAsAny[StageRecipe], BeforeValidator(_by_stage)]
"""The recipe of any stage."""
