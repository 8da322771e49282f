"""Warnings about recipe keys without effect and about unusual values."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from posttrain.errors import InputError
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.recipe.engines import has_thinking
from posttrain.recipe.model import RewardSource, stored_thinking
from posttrain.recipe.needs import without_effect
from posttrain.recipe.run import StageRecipe
from posttrain.recipe.sources import read_file


def recipe_warnings(recipe: StageRecipe) -> list[str]:
    """One sentence for each key without effect and each unusual value."""
    engine = getattr(recipe, "engine", None)
    engine_warnings = engine.warnings(recipe.model) if engine is not None else []
    return [*without_effect(recipe), *_thinking(recipe), *engine_warnings, *recipe.warnings()]


def _thinking(recipe: StageRecipe) -> list[str]:
    """Warnings if the model, the reward model and the format of answers disagree about thinking."""
    if recipe.remote is not None:
        return []
    reward, environment = getattr(recipe, "reward", None), getattr(recipe, "environment", None)
    warnings = thinking_differs(recipe, recipe.model.path, *origin_of(recipe.model.path))
    if isinstance(reward, RewardSource):
        warnings += thinking_differs(recipe, reward.path, *origin_of(reward.path))
    used = stored_thinking(recipe.model.path) if recipe.model.thinking == "template" else recipe.model.thinking
    if environment is None or used is None or (key := _thinking_key(environment)) is None:
        return warnings
    if has_thinking(environment) != (used == "on"):
        asked = f"environment.{key} is {str(has_thinking(environment)).lower()}, and model.thinking is {used}"
        apart = "so the chat template and the environment ask for different answers"
        warnings.append(f"{asked}, {apart}; set both to the same")
    return warnings


def origin_of(path: str) -> tuple[Mapping[str, Any], str]:
    """The recipe of the run that exported the model at `path` or saved it as a checkpoint, empty if unknown, and its name."""
    model = Path(path).expanduser()
    for run in [model.parent, *model.parents[2:3]]:
        if (run / "recipe.yaml").is_file() and (run / "environment.json").is_file():
            with suppress(InputError):
                return read_file(str(run / "recipe.yaml")).values, f"the run {run}"
    return {}, "an earlier run"


def thinking_differs(recipe: StageRecipe, path: str, origin: Mapping[str, Any], name: str) -> list[str]:
    """Warnings if `recipe` uses the model at `path` but differs in thinking from the recipe that trained it.

    Args:
        origin: the keys of that recipe; empty if unknown.
        name: the run or stage of that recipe.
    """
    warnings = []
    set_before = stored_thinking(path) or (origin.get("model") or {}).get("thinking", "template")
    used = recipe.model.thinking
    if used == "template" and path != recipe.model.path:
        used = stored_thinking(recipe.model.path) or used
    if "template" not in (used, set_before) and used != set_before:
        warnings.append(f"model.thinking is {used}, and {name}, which trained {path}, had model.thinking {set_before}")
    ours, theirs = getattr(recipe, "environment", None), origin.get("environment") or {}
    before = theirs.get("thinking", (theirs.get("format") or {}).get("thinking"))
    if ours is None or before is None or (key := _thinking_key(ours)) is None or before == has_thinking(ours):
        return warnings
    now, before = (str(value).lower() for value in (has_thinking(ours), before))
    warnings.append(
        f"environment.{key} is {now}, and {name}, which trained {path}, had environment.{key} {before}, so the model has "
        "learned another format of answers; set both to the same"
    )
    return warnings


def _thinking_key(environment: EnvironmentRecipe) -> str | None:
    """The key that determines whether answers have a thinking block; None if the environment has no such key."""
    if hasattr(environment, "thinking"):
        return "thinking"
    return "format.thinking" if hasattr(getattr(environment, "format", None), "thinking") else None
