"""A pipeline: stages in order, each a recipe of its own, chained by the models they export."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from posttrain.errors import InputError
from posttrain.recipe.base import BaseConfig
from posttrain.recipe.catalogue import recipe_file
from posttrain.recipe.compose import merge_typed, typed_recipe
from posttrain.recipe.sources import Layer, merge, read_file, read_overrides
from posttrain.recipe.stages import STAGES, Recipe
from posttrain.recipe.validation import nearest_type

_STAGE = "stage:"
_KEYS = ("stage", "name", "runs", "common", "stages")
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class PipelineStage(BaseConfig):
    """One stage of a pipeline, resolved."""

    name: str = Field(pattern=_NAME)
    """Name of the stage: its run is `<runs>/<pipeline>/<name>`."""
    upstream: str | None = None
    """The earlier stage whose exported model this one starts from (`from:` in the file)."""
    inputs: list[str] = []
    """Earlier stages whose exported models it uses, `upstream` among them (`stage:NAME` anywhere in its keys)."""
    recipe: Recipe
    """What the stage does, with its own name, directory and model filled in."""


class PipelineRecipe(BaseConfig):
    """Stages chained with lineage; `load_pipeline` resolves every stage to a typed recipe."""

    stage: Literal["pipeline"] = "pipeline"
    """`pipeline`; `posttrain pipeline` takes this one."""
    name: str = Field("pipeline", pattern=_NAME)
    """Name of the pipeline: its stages' runs are in `<runs>/<name>`."""
    runs: str = "runs"
    """Directory that holds the pipeline's directory."""
    stages: list[PipelineStage] = Field(min_length=1)
    """The stages in the order they run."""

    @property
    def directory(self) -> Path:
        """Where the stages' runs are."""
        return Path(self.runs) / self.name


def load_pipeline(source: str, overrides: list[str], changes: Sequence[Layer] = ()) -> PipelineRecipe:
    """The pipeline in the YAML file `source`, every stage resolved.

    The file has `name`, `runs`, `common` (keys beneath every stage) and `stages`, a list of `name`, `from` (an
    earlier stage whose exported model becomes `model.path`; any other key may name one as `stage:NAME`), `recipe` (a file relative to this one) and the stage's
    own keys, which win over the file's. Overrides are `name=`, `runs=`, `common.KEY=` and `stages.NAME.KEY=`; they win over all
    files, and those of one stage over those of all. `changes` are overrides that have been read already.
    Raises `InputError` with one sentence per problem; each names the stage.
    """
    changes = [*read_overrides(overrides), *changes]
    source = str(recipe_file(source))
    given = merge([read_file(source), *(layer for layer in changes if not {"stages", "common"} & layer.values.keys())])
    _check_file(given, source)
    entries = [given.part("stages", str(at)) for at in range(len(given.values["stages"]))]
    names = [_name(entry, at, source) for at, entry in enumerate(entries)]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{source}: two stages are called {name}; rename one")
    changed = [_change_of_stage(layer, names) for layer in changes if "stages" in layer.values]
    directory = Path(given.values.get("runs", "runs")) / given.values.get("name", "pipeline")
    common = given.part("common") if "common" in given.values else Layer({})
    for_all = [_change_of_all(layer) for layer in changes if "common" in layer.values]
    stages: list[PipelineStage] = []
    problems: list[str] = []
    for name, entry in zip(names, entries, strict=True):
        own = [entry, *(layer for changed_name, layer in changed if changed_name == name)]
        try:
            stages.append(_resolved(name, common, own, for_all, Path(source).parent, directory, stages, names))
        except InputError as error:
            problems += [f"stage {name}: {sentence}" for sentence in str(error).splitlines()]
    if problems:
        raise InputError("\n".join(problems))
    return PipelineRecipe(stages=stages, **{key: given.values[key] for key in ("name", "runs") if key in given.values})


def _resolved(
    name: str,
    common: Layer,
    own: list[Layer],
    for_all: list[Layer],
    folder: Path,
    directory: Path,
    earlier: list[PipelineStage],
    names: list[str],
) -> PipelineStage:
    """One stage. `own`: its entry in the file and its overrides; `for_all`: overrides of every stage, between those."""
    entry = merge(own)
    upstream, file = entry.values.get("from"), entry.values.get("recipe")
    for key, value in (("from", upstream), ("recipe", file)):
        if value is not None and not isinstance(value, str):
            raise InputError(f"{entry.origin((key,))}: {key} is {json.dumps(value)}; it must be text")
    if "runs" in entry.values:
        raise InputError(f"{entry.origin(('runs',))}: runs of a stage has no effect; set runs of the pipeline")
    given_keys = merge([own[0], *for_all, *own[1:]])
    values = {key: value for key, value in given_keys.values.items() if key not in ("name", "from", "recipe")}
    place: dict[str, Any] = {"name": name, "runs": str(directory)}
    if upstream is not None:
        if isinstance(entry.values.get("model"), dict) and "path" in entry.values["model"]:
            where = entry.origin(("model", "path"))
            raise InputError(f"{where}: model.path and from: {upstream} both say which model to start from; keep one")
        place["model"] = {"path": f"{_STAGE}{upstream}"}
    layers = [common, *([read_file(str(folder / file))] if file else []), Layer(values, given_keys.origins)]
    where = entry.origin(("from",))
    layers.append(Layer(place, {("model", "path"): where} if where else {}))
    stage = merge(layers).values.get("stage")
    given = merge_typed(layers, stage) if stage in STAGES else merge(layers)
    inputs: list[str] = []
    given = Layer(_with_models(given.values, (), given, directory, earlier, names, inputs), given.origins)
    if stage is None:
        raise InputError(f"{entry.origin(('name',))}: stage is missing; say {', '.join(STAGES)}")
    if stage not in STAGES:
        hint = nearest_type(str(stage), list(STAGES))
        where = given.origin(("stage",))
        raise InputError(f"{where}: stage is {json.dumps(stage)}{hint}; it must be {', '.join(STAGES)}")
    return PipelineStage(name=name, upstream=upstream, inputs=inputs, recipe=typed_recipe(given, stage))


def _with_models(
    value: Any,
    path: tuple[str, ...],
    given: Layer,
    directory: Path,
    earlier: list[PipelineStage],
    names: list[str],
    inputs: list[str],
) -> Any:
    """`value` with every `stage:NAME` as the directory of that stage's model; the names go to `inputs`."""
    if isinstance(value, dict):
        return {
            key: _with_models(inner, (*path, key), given, directory, earlier, names, inputs)
            for key, inner in value.items()
        }
    if not isinstance(value, str) or not value.startswith(_STAGE):
        return value
    name = value.removeprefix(_STAGE)
    where = given.origin(path) or "from"
    _require_exported(name, where, earlier, names)
    if name not in inputs:
        inputs.append(name)
    return str(directory / name / "model")


def _require_exported(upstream: str, where: str, earlier: list[PipelineStage], names: list[str]) -> None:
    """`InputError` unless `upstream` is an earlier stage that exports a model."""
    source = next((stage for stage in earlier if stage.name == upstream), None)
    if source is None and upstream in names:
        raise InputError(f"{where}: it names {upstream}, which is not an earlier stage; move it up or correct it")
    if source is None:
        raise InputError(
            f"{where}: there is no stage {upstream}{nearest_type(upstream, names)}; use {', '.join(names)}"
        )
    if source.recipe.stage in ("evaluate", "generate"):
        raise InputError(
            f"{where}: {upstream} only {source.recipe.stage}s and exports no model; name a stage that trains"
        )


def _check_file(given: Layer, source: str) -> None:
    for key in given.values:
        if key not in _KEYS:
            hint = nearest_type(key, list(_KEYS)) or (" (put it under common)" if _is_recipe_key(key) else "")
            where = given.origin((key,))
            raise InputError(f"{where}: there is no key {key} in a pipeline{hint}; the keys are {', '.join(_KEYS)}")
    if (stage := given.values.get("stage", "pipeline")) != "pipeline":
        remedy = f"run it with `posttrain {stage}`" if stage in STAGES else "write `stage: pipeline`"
        raise InputError(f"{given.origin(('stage',))}: the recipe is for stage {stage}, not pipeline; {remedy}")
    stages = given.values.get("stages")
    if not isinstance(stages, list) or not stages or not all(isinstance(entry, dict) for entry in stages):
        where = given.origin(("stages",)) or source
        raise InputError(f"{where}: stages must be a list of stages, each with a `name` and a `stage` or `recipe`")
    if not isinstance(given.values.get("common") or {}, dict):
        raise InputError(f"{given.origin(('common',))}: common must be a section of keys beneath every stage")
    for key in ("name", "runs"):
        if key in given.values and not (isinstance(given.values[key], str) and given.values[key]):
            where = given.origin((key,))
            raise InputError(f"{where}: {key} is {json.dumps(given.values[key])}; it must be text, in quotes")


def _is_recipe_key(key: str) -> bool:
    return any(key in schema.model_fields for schema in STAGES.values())


def _name(entry: Layer, at: int, source: str) -> str:
    name = entry.values.get("name")
    where = entry.origin(("name",)) or next(iter(entry.origins.values()), source)
    if not isinstance(name, str) or not name:
        raise InputError(f"{where}: stage {at + 1} of the pipeline has no name; give it one, as text")
    return name


def _change_of_all(layer: Layer) -> Layer:
    """The keys that an override `common.KEY=value` gives to every stage."""
    if not isinstance(layer.values["common"], dict):
        where = layer.origin(("common",))
        raise InputError(f"{where}: common must be a section of keys for every stage; write `common.KEY=value`")
    return layer.part("common")


def _change_of_stage(layer: Layer, names: list[str]) -> tuple[str, Layer]:
    """Which stage an override `stages.NAME.KEY=value` changes, and how."""
    where = layer.origin(("stages",))
    changes = layer.values["stages"]
    if not isinstance(changes, dict) or not all(isinstance(change, dict) for change in changes.values()):
        raise InputError(f"{where}: the stages are changed one key at a time; write `stages.NAME.KEY=value`")
    (name,) = changes
    if name not in names:
        raise InputError(f"{where}: there is no stage {name}{nearest_type(name, names)}; use {', '.join(names)}")
    return name, layer.part("stages", name)
