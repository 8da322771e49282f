"""What a recipe names and a run needs, checked before torch is imported: a wrong path answers at once."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from posttrain.data.files import require_source
from posttrain.errors import InputError
from posttrain.plugins import pip_command
from posttrain.recipe.base import BaseConfig
from posttrain.recipe.data import SourceRecipe
from posttrain.recipe.run import StageRecipe


def require_inputs(recipe: StageRecipe, engine_too: bool = True) -> None:
    """InputError for files of rows and folders of models that are not on this machine; with `engine_too`, for the engine."""
    if engine_too:
        require_extras(recipe)
    for section in _sections(recipe):
        if isinstance(section, SourceRecipe):
            require_source(section)
    for key, model in recipe.models().items():
        path = model.path or ""
        if path.startswith((".", "/", "~")) and not Path(path).expanduser().exists():
            raise InputError(f"{key}.path: there is no folder {path}; train the model first, or correct the path")
    engine, hardware = recipe.sampler, getattr(recipe, "hardware", None)
    starts = engine_too and getattr(engine, "type", None) == "vllm" and not engine.urls and engine.python is None
    if starts and (hardware is None or hardware.ray is None) and find_spec("vllm") is None:
        raise InputError(
            f"engine.type: vllm is not installed; run `{pip_command('vllm')}`, or set engine.python to an interpreter that has it"
        )


def require_extras(recipe: StageRecipe) -> None:
    """InputError for sinks and an optimizer whose packages are not installed; none is imported."""
    needed = [(f"sinks: {name}", name) for name in getattr(recipe, "sinks", ())]
    if getattr(getattr(recipe, "optimizer", None), "type", "") == "adamw_8bit":
        needed.append(("optimizer.type: adamw_8bit", "bitsandbytes"))
    for what, module in needed:
        if find_spec(module) is None:
            raise InputError(f"{what} needs the package {module}; run `{pip_command(module)}`")


def _sections(value: Any) -> Iterator[BaseConfig]:
    """All sections of a recipe."""
    if isinstance(value, BaseConfig):
        yield value
        value = [inner for _, inner in value]
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _sections(inner)
