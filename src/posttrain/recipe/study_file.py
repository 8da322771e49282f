"""Load a study: its file and overrides, the recipe that it searches, and the recipe of each search point."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import InputError
from posttrain.recipe.catalogue import recipe_file
from posttrain.recipe.compose import checked, merge_typed, require_stage, typed_recipe
from posttrain.recipe.sources import Layer, merge, read_file, read_overrides
from posttrain.recipe.stages import Recipe
from posttrain.recipe.study import Range, StudyRecipe, Together, check_metrics, choices_of
from posttrain.recipe.trust import require_trust_of_run

_TRAINED = ("sft", "reward", "dpo", "rl", "distill")
"""Stages that have a learning curve."""
Point = Mapping[str, Any]
"""Name of a search -> its value."""


@dataclass(frozen=True)
class Study:
    """A study and the recipe that it searches."""

    recipe: StudyRecipe
    trained: str
    """The stage of the trials."""
    base: Layer
    """Values of all trials: the recipe files and `keys`."""

    @property
    def directory(self) -> Path:
        """Directory of the study."""
        return Path(self.recipe.runs) / self.recipe.name

    def keys_of(self, point: Point) -> dict[str, Any]:
        """Recipe key -> value at `point`. Settings that change together are separate keys."""
        values: dict[str, Any] = {}
        for name, value in point.items():
            values |= value if isinstance(self.recipe.spaces.get(name), Together) else {name: value}
        return values

    def at(self, point: Point, runs: Path | None = None, name: str = "trial", **keys: Any) -> Recipe:
        """The recipe of `point`, as run `<runs>/<name>` and with top-level `keys`. Raises `InputError` if it is not valid."""
        named = self.keys_of(point).items()
        origins = {tuple(key.split(".")): f"{key}={shown(value)}" for key, value in named}
        place = {"runs": str(runs or self.directory / "trials"), "name": name}
        # One layer for all keys, so that a type and the keys of that type can be searched in any order.
        values = merge([Layer(nested(key, value)) for key, value in named]).values
        return typed_recipe(merge_typed([self.base, Layer(values | place | keys, origins)], self.trained), self.trained)


def nested(key: str, value: Any) -> dict[str, Any]:
    """The nested form of a dotted key: `a.b` and 1 become {"a": {"b": 1}}."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def shown(value: Any, narrow: bool = False) -> str:
    """A value as text for a table: numbers with four digits, settings as `key=value`, or only their values if `narrow`."""
    if isinstance(value, float):
        return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.4g}")  # 1e-5, not 1e-05
    if isinstance(value, dict) and narrow:
        return "/".join(shown(inner) for inner in value.values())
    if isinstance(value, dict):
        return ", ".join(f"{key}={shown(inner)}" for key, inner in value.items())
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def load_study(source: str, overrides: Sequence[str]) -> Study:
    """The study in the YAML file `source` with overrides such as `trials=30`, `search.KEY.high=1e-4`, `keys.KEY=value`.

    Raises `InputError` with one sentence per problem, each with the file and line, or the override, that caused it.
    This includes an objective that is not a held-out metric, and a limit on a metric that the stage does not measure.
    """
    source = str(recipe_file(source))
    given = _merged([read_file(source), *map(_whole_names, read_overrides(list(overrides)))])
    require_stage(given, "tune")
    recipe = checked(given, StudyRecipe)
    folder = Path(source).parent
    files = [read_file(str(folder / file)) for file in recipe.recipe]
    fixed = given.part("keys") if recipe.keys else Layer({})
    for key in ("name", "runs"):
        if key in fixed.values:
            raise InputError(f"{fixed.origin((key,))}: {key} of a trial has no effect; set {key} of the study")
    stage = merge([*files, fixed]).values.get("stage")
    if stage not in _TRAINED:
        problem = "the recipe has no stage" if stage is None else f"the recipe is for stage {stage}"
        raise InputError(
            f"{given.origin(('recipe',)) or source}: {problem}; a study searches one of {', '.join(_TRAINED)}; set it, for "
            "example `keys.stage=rl`"
        )
    for file, layer in zip(recipe.recipe, files, strict=True):
        require_trust_of_run(folder / file, layer.values, stage, [fixed])
    study = Study(recipe, stage, merge_typed([*files, fixed], stage))
    for number, point in enumerate(recipe.start, start=1):
        for key, value in point.items():
            if (words := _refused(recipe.search[key], value)) is not None:
                where = given.origin(("start", str(number - 1))) or given.origin(("start",))
                raise InputError(f"{where}: start point {number} has {key} = {shown(value)}, which is not {words}")
    check_metrics(recipe.objective, stage, study.base.values, given, source)
    return study


def _refused(values: Any, value: Any) -> str | None:
    """What a value of a key that is searched among `values` must be, in words; None if `value` is."""
    if isinstance(values, Range):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = number and values.low <= value <= values.high
        return None if fits else f"from {values.low:g} to {values.high:g}"
    choices = choices_of(values) or []
    return None if value in choices else f"one of {', '.join(map(shown, choices))}"


def _merged(layers: Sequence[Layer]) -> Layer:
    """The layers merged left to right. The entries of `search` are merged separately, because their names contain dots."""
    plain = [Layer({key: v for key, v in layer.values.items() if key != "search"}, layer.origins) for layer in layers]
    merged = merge(plain)
    search: dict[str, Any] = {}
    for layer in layers:
        values = layer.values.get("search", {})
        if not isinstance(values, dict):
            raise InputError(f"{layer.origin(('search',))}: search must be a section of recipe keys")
        name = next((known for known in search for new in values if new.startswith(f"{known}.")), None)
        if name is not None:
            (long,) = values
            values = {name: nested(long.removeprefix(f"{name}."), values[long])}
        for key, value in values.items():
            old = search.get(key)
            search[key] = old | value if isinstance(old, dict) and isinstance(value, dict) else value
    return Layer(merged.values | ({"search": search} if search else {}), merged.origins)


def _whole_names(layer: Layer) -> Layer:
    """An override `search.a.b.c=1` as {"search": {"a.b.c": 1}}."""
    value, name = layer.values.get("search"), list[str]()
    if not isinstance(value, dict) or len(value) != 1 or "." in next(iter(value)):
        return layer
    while isinstance(value, dict) and len(value) == 1 and not (name and name[-1] in Range.model_fields):
        ((part, inner),) = value.items()
        if part in Together.model_fields or (part in Range.model_fields and not name):
            break
        name.append(part)
        value = inner
    where = next(iter(layer.origins.values()))
    key = ".".join(name)
    return Layer({"search": {key: value}}, {("search",): where, ("search", key): where})
