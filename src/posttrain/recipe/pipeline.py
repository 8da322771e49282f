"""A pipeline: stages in order, each its own recipe, chained by the files and models that they make."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from posttrain.errors import InputError
from posttrain.recipe.base import NAME, BaseConfig, Reads, Text, Writes
from posttrain.recipe.catalogue import recipe_file
from posttrain.recipe.compose import checked, merge_typed, require_stage, typed_recipe
from posttrain.recipe.reference import either
from posttrain.recipe.sources import KeyPath, Layer, merge, read_file, read_overrides
from posttrain.recipe.stages import STAGES, Recipe
from posttrain.recipe.trust import require_trust_of_run
from posttrain.recipe.validation import nearest_type

_STAGE = "stage:"

STAGE = "stage "
"""Prefix of the names of stages among the inputs in `lineage.json`."""


class ConvertedFile(BaseConfig):
    """One file that a `convert` stage makes, with the settings of `posttrain data convert`."""

    converter: Text
    """What makes the rows: a converter of `posttrain data convert`."""
    split: Text | None = None
    """Split of the source: its name on the hub, or a word in the names of a folder's files. Null: the training split."""
    subset: Text | None = None
    """Configuration of a hub data set, or subfolder of a folder. Null: that of the published data set."""
    language: Text | None = None
    """For rows with a language: the one to keep; `any` keeps all. Null: the converter's default."""
    limit: int | None = Field(None, ge=1)
    """Maximum number of rows to write. Null: all."""
    shuffle: bool = False
    """Write the rows in a fixed random order; `limit` then samples from all rows."""


class ConvertRecipe(BaseConfig):
    """A stage of a pipeline that converts a data set to files. Later stages read them as `stage:NAME/FILE`."""

    stage: Literal["convert"] = "convert"
    """`convert`, in pipelines only."""
    trains: ClassVar[bool] = False
    name: Text = Field(pattern=NAME)
    """Name of the stage. Its files are in `<runs>/<name>`."""
    runs: Writes
    """Directory of the pipeline."""
    source: Reads | None = None
    """A folder, a file or a hub id. Null: `data` of the pipeline, or else the published data set of each converter."""
    files: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], ConvertedFile] = Field(min_length=1)
    """Name of a file, without `.jsonl` -> how it is made."""


class PipelineStage(BaseConfig):
    """One stage of a pipeline, resolved."""

    name: Text = Field(pattern=NAME)
    """Name of the stage: its run is `<runs>/<pipeline>/<name>`."""
    upstream: Text | None = None
    """The earlier stage whose exported model this one starts from (`from:` in the file)."""
    inputs: list[Text] = []
    """Earlier stages whose models or files it uses, `upstream` among them (`stage:NAME` or `stage:NAME/FILE` in its keys)."""
    recipe: Recipe | ConvertRecipe
    """The settings of the stage, with its name, directory and model filled in."""

    @property
    def files(self) -> list[str]:
        """Names of the files that a stage that converts data writes; empty if it exports a model."""
        return [f"{file}.jsonl" for file in self.recipe.files] if isinstance(self.recipe, ConvertRecipe) else []


class PipelineRecipe(BaseConfig):
    """Stages chained with lineage; `load_pipeline` resolves every stage to a typed recipe."""

    stage: Literal["pipeline"] = "pipeline"
    """`pipeline`; `posttrain pipeline` takes this one."""
    name: Text = Field("pipeline", pattern=NAME)
    """Name of the pipeline: its stages' runs are in `<runs>/<name>`."""
    runs: Writes = "runs"
    """Directory that holds the pipeline's directory."""
    stages: list[PipelineStage] = Field(min_length=1)
    """The stages in the order they run."""

    @property
    def directory(self) -> Path:
        """Where the stages' runs are."""
        return Path(self.runs) / self.name


class PipelineFile(BaseConfig):
    """The file of a pipeline. `load_pipeline` says what its keys are."""

    stage: Literal["pipeline"] = "pipeline"
    name: Text = Field("pipeline", pattern=NAME)
    runs: Writes = "runs"
    data: Reads | None = None
    common: dict[str, Any] = {}
    stages: list[dict[str, Any]] = Field(min_length=1)


@dataclass
class _File:
    """What the stages of one file have in common."""

    folder: Path
    """Where the file is; the recipes of its stages are relative to it."""
    directory: Path
    """Where the stages' runs are."""
    names: list[str]
    """Of all stages."""
    common: Layer
    """Keys beneath every stage."""
    for_all: list[Layer]
    """Overrides of every stage."""
    earlier: dict[str, PipelineStage | None] = field(default_factory=dict)
    """Name -> stage that has been read, in order; None for a stage with problems."""


def load_pipeline(source: str, overrides: list[str], changes: Sequence[Layer] = ()) -> PipelineRecipe:
    """The pipeline in the YAML file `source`, every stage resolved.

    The file has `name`, `runs`, `data` (the source of `convert` stages), `common` (keys beneath every other stage) and
    `stages`, a list of `name`, `from` (an earlier stage whose exported model becomes `model.path`; any other key may
    name one as `stage:NAME`, and a converted file as `stage:NAME/FILE`), `recipe` (a file relative to this one, or
    several, merged left to right) and further keys of the stage, which take precedence over the file's. Overrides are
    `name=`, `runs=`, `data=`, `common.KEY=` and `stages.NAME.KEY=`. They take precedence over all files, and overrides
    of one stage over those of all stages. `changes` are overrides that have already been parsed.
    Raises `InputError` with one sentence per problem; each names the stage.
    """
    changes = [*read_overrides(overrides), *changes]
    source = str(recipe_file(source))
    given = merge([read_file(source), *(layer for layer in changes if not {"stages", "common"} & layer.values.keys())])
    require_stage(given, "pipeline")
    whole = checked(given, PipelineFile)
    entries, names = [given.part("stages", str(at)) for at in range(len(whole.stages))], list[str]()
    for at, entry in enumerate(entries, start=1):
        name = entry.values.get("name")
        place = entry.origin(("name",)) or next(iter(entry.origins.values()), source)
        if not isinstance(name, str) or not name:
            raise InputError(f"{place}: stage {at} of the pipeline has no name; give it one, as text")
        if name in names:
            raise InputError(f"{source}: two stages are called {name}; rename one")
        names.append(name)
    changed = [_change_of_stage(layer, names) for layer in changes if "stages" in layer.values]
    for layer in changes:
        if not isinstance(layer.values.get("common", {}), dict):
            where = layer.origin(("common",))
            raise InputError(f"{where}: common must be a section of keys for every stage; write `common.KEY=value`")
    file = _File(
        Path(source).parent,
        Path(whole.runs) / whole.name,
        names,
        given.part("common") if "common" in given.values else Layer({}),
        [layer.part("common") for layer in changes if "common" in layer.values],
    )
    problems: list[str] = []
    for name, entry in zip(names, entries, strict=True):
        stage_layers = [entry, *(layer for changed_name, layer in changed if changed_name == name)]
        try:
            if merge(stage_layers).values.get("stage") == "convert":
                # The default source is `data` of the pipeline.
                data = Layer({"source": whole.data}, {("source",): given.origin(("data",)) or ""})
                here = Layer({"name": name, "runs": str(file.directory)})
                conversion = checked(merge([data, *stage_layers, here]), ConvertRecipe)
                file.earlier[name] = PipelineStage(name=name, recipe=conversion)
            else:
                file.earlier[name] = _resolved(name, stage_layers, file)
        except InputError as error:
            file.earlier[name] = None
            problems += [f"stage {name}: {sentence}" for sentence in str(error).splitlines()]
    if whole.data is not None and not any(entry.values.get("stage") == "convert" for entry in entries):
        where = given.origin(("data",))
        problems.append(f"{where}: data has no effect without a stage that converts it; set keys of stages")
    if problems:
        raise InputError("\n".join(problems))
    stages = [stage for stage in file.earlier.values() if stage is not None]
    return PipelineRecipe(stages=stages, name=whole.name, runs=whole.runs)


def _resolved(name: str, stage_layers: list[Layer], pipeline: _File) -> PipelineStage:
    """One stage. `stage_layers`: its entry in the file and its overrides, between which are those of every stage."""
    entry = merge(stage_layers)

    def refuse(key: KeyPath, problem: str) -> InputError:
        return InputError(f"{entry.origin(key)}: {problem}")

    upstream, files = entry.values.get("from"), entry.values.get("recipe") or []
    files = [files] if isinstance(files, str) else files
    if upstream is not None and not isinstance(upstream, str):
        raise refuse(("from",), f"from is {json.dumps(upstream)}; it must be text")
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise refuse(("recipe",), f"recipe is {json.dumps(files)}; it must be a file or a list of files")
    if "runs" in entry.values:
        raise refuse(("runs",), "runs of a stage has no effect; set runs of the pipeline")
    given_keys = merge([stage_layers[0], *pipeline.for_all, *stage_layers[1:]])
    values = {key: value for key, value in given_keys.values.items() if key not in ("name", "from", "recipe")}
    place: dict[str, Any] = {"name": name, "runs": str(pipeline.directory)}
    if upstream is not None:
        if isinstance(entry.values.get("model"), dict) and "path" in entry.values["model"]:
            both = f"model.path and from: {upstream} both set the model to start from; keep one"
            raise refuse(("model", "path"), both)
        place["model"] = {"path": f"{_STAGE}{upstream}"}
    read = [read_file(str(pipeline.folder / file)) for file in files]
    layers = [pipeline.common, *read, Layer(values, given_keys.origins)]
    where = entry.origin(("from",))
    layers.append(Layer(place, {("model", "path"): where} if where else {}))
    stage: Any = merge(layers).values.get("stage")
    for file, layer in zip(files if stage in STAGES else (), read, strict=False):
        require_trust_of_run(pipeline.folder / file, layer.values, str(stage), stage_layers)
    given = merge_typed(layers, stage) if stage in STAGES else merge(layers)
    inputs: list[str] = []
    given = Layer(_with_models(given.values, (), given, pipeline, inputs), given.origins)
    if stage is None:
        raise refuse(("name",), f"stage is missing; say {', '.join(STAGES)}")
    if stage not in STAGES:
        hint, where = nearest_type(str(stage), list(STAGES)), given.origin(("stage",))
        raise InputError(f"{where}: stage is {json.dumps(stage)}{hint}; it must be {', '.join(STAGES)}")
    return PipelineStage(name=name, upstream=upstream, inputs=inputs, recipe=typed_recipe(given, stage))


def _with_models(value: Any, path: KeyPath, given: Layer, pipeline: _File, inputs: list[str]) -> Any:
    """`value` with every `stage:NAME` as the directory of that stage's model and every `stage:NAME/FILE` as the path of that
    file; the names go to `inputs`. `InputError` unless an earlier stage exports that model or makes that file."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        inside = {key: _with_models(inner, (*path, str(key)), given, pipeline, inputs) for key, inner in items}
        return inside if isinstance(value, dict) else list(inside.values())
    if not isinstance(value, str) or not value.startswith(_STAGE):
        return value
    upstream, _, file = value.removeprefix(_STAGE).partition("/")
    where, source, names = given.origin(path) or "from", pipeline.earlier.get(upstream), pipeline.names
    if source is None:
        if upstream in pipeline.earlier:
            raise InputError("")  # The messages about that stage suffice.
        problem = f"there is no stage {upstream}{nearest_type(upstream, names)}; use {', '.join(names)}"
        if upstream in names:
            problem = f"it names {upstream}, which is not an earlier stage; move it up or correct it"
        raise InputError(f"{where}: {problem}")
    made = [one.removesuffix(".jsonl") for one in source.files]
    problem = ""
    if made and file not in made:
        choices = either([f"{_STAGE}{upstream}/{name}" for name in made])
        problem = f"makes no file {file!r}{nearest_type(file, made)}; use {choices}"
    elif file and not made:
        problem = f"exports a model and no files; write stage:{upstream}"
    elif source.recipe.stage in ("evaluate", "generate"):
        problem = "only evaluates or generates and exports no model; name a stage that trains"
    if problem:
        raise InputError(f"{where}: {upstream} {problem}")
    if upstream not in inputs:
        inputs.append(upstream)
    return str(pipeline.directory / upstream / (f"{file}.jsonl" if file else "model"))


def _change_of_stage(layer: Layer, names: list[str]) -> tuple[str, Layer]:
    """The stage that an override `stages.NAME.KEY=value` changes, and the change."""
    where, changes = layer.origin(("stages",)), layer.values["stages"]
    if not isinstance(changes, dict) or not all(isinstance(change, dict) for change in changes.values()):
        raise InputError(f"{where}: the stages are changed one key at a time; write `stages.NAME.KEY=value`")
    (name,) = changes
    if name not in names:
        raise InputError(f"{where}: there is no stage {name}{nearest_type(name, names)}; use {', '.join(names)}")
    return name, layer.part("stages", name)
