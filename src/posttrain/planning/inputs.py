"""What a recipe names and a run needs, checked before torch is imported: a wrong path or column answers at once."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

from posttrain.data.examples import read_examples
from posttrain.data.files import require_source
from posttrain.data.held_out import as_count, nothing_left
from posttrain.data.problems import Problems
from posttrain.errors import InputError
from posttrain.models.files import require_model
from posttrain.plugins import pip_command
from posttrain.recipe.base import BaseConfig
from posttrain.recipe.data import ColumnsRecipe, ConversationColumns, SourceRecipe
from posttrain.recipe.run import StageRecipe
from posttrain.recipe.trust import uses


def require_inputs(recipe: StageRecipe, engine_too: bool = True) -> None:
    """InputError for files of rows and folders of models that are not on this machine; with `engine_too`, for the engine."""
    if engine_too:
        require_extras(recipe)
    for use in uses(type(recipe), recipe.model_dump(mode="json")):
        file = re.fullmatch(r"(\S+\.py)(:\w+)?", str(use.value)) if use.does == "executes" else None
        if file is not None and not Path(file[1]).is_file():
            raise InputError(f"{use.key}: there is no file {file[1]}; correct the path")
        if file is not None and file[2] and use.key.endswith("environment.reward"):
            from posttrain.environments.rewards import load_reward  # imports numpy

            load_reward(str(use.value), use.key)
    for section, name, sources in _row_files(recipe):
        _require_rows(recipe, section, sources, getattr(section, "held_out", 0) if name == "train" else 0)
    for key, model in recipe.models().items():
        if model.path:
            require_model(model.path, f"{key}.path")
    engine, hardware = recipe.sampler, getattr(recipe, "hardware", None)
    starts = engine_too and getattr(engine, "type", None) == "vllm" and not engine.urls and engine.python is None
    if starts and (hardware is None or hardware.ray is None) and find_spec("vllm") is None:
        remedy = f"run `{pip_command('vllm')}`, or set engine.python to an interpreter that has it"
        raise InputError(f"engine.type: vllm is not installed; {remedy}")


def _require_rows(recipe: StageRecipe, section: BaseConfig, sources: list[SourceRecipe], held_out: float) -> None:
    """InputError for files that are not there, and for those of this machine without a row that the stage can use, or with
    none left beside the number or share of rows to hold out, `held_out`."""
    for source in sources:
        require_source(source)
    columns: Any = getattr(section, "columns", None)
    if issubclass(type(columns), ConversationColumns) and all(source.folder for source in sources):
        kind: Any = getattr(recipe if section is getattr(recipe, "data", None) else section, "kind", "prompt")
        problems = Problems()
        names = ColumnsRecipe.model_validate(columns.model_dump())
        enough = 1 + (held_out if isinstance(held_out, int) else ceil(1 / (1 - held_out)))
        usable = sum(1 for _ in islice(read_examples(kind, sources, names, problems), enough))
        if not usable:
            problems.require_any(", ".join(source.path for source in sources))
        if usable <= (most := as_count(held_out, usable)):
            raise InputError("\n".join([nothing_left(most, usable), *problems.summary()]))


def rows_are_here(recipe: StageRecipe) -> bool:
    """Whether no file of rows has to be downloaded."""
    return all(one.folder for _, _, sources in _row_files(recipe) for one in sources)


def _row_files(section: BaseConfig) -> Iterator[tuple[BaseConfig, str, list[SourceRecipe]]]:
    """The lists of files of rows in a section and in those inside it, each with its section and its key in that."""
    for name, value in section:
        if isinstance(value, list) and value and all(isinstance(one, SourceRecipe) for one in value):
            yield section, name, value
    for _, value in section:
        for inner in value if isinstance(value, list | tuple) else (value,):
            if isinstance(inner, BaseConfig):
                yield from _row_files(inner)


def require_extras(recipe: StageRecipe) -> None:
    """InputError for sinks whose packages are not installed; none is imported."""
    for name in getattr(recipe, "sinks", ()):
        if find_spec(name) is None:
            raise InputError(f"sinks: {name} needs the package {name}; run `{pip_command(name)}`")
