"""Recipes by name: those that ship with posttrain, such as `demo/pipeline`, and those that plug-ins add.

A recipe's name is its path in the shipped folder, without `.yaml`. A local file of the same name takes precedence. In a
checkout the shipped folder is `recipes/`; a wheel contains a copy of it.

A plug-in adds a folder of recipes through an entry point, whose value is the package that is the folder:

    [project.entry-points."posttrain.recipes"]
    maze = "maze_package.recipes"

Its recipes are then called `maze/NAME`.
"""

import difflib
import importlib.util
import itertools
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from posttrain.errors import InputError
from posttrain.plugins import entry_points, more

_PACKAGE = Path(__file__).parents[1]
_SUFFIXES = (".yaml", ".yml")


def shipped(folder: str) -> Path | None:
    """The folder `recipes` or `examples` of the installation: that of the wheel, else that of the checkout; or None."""
    checkout = _PACKAGE.parents[1]
    inside = _PACKAGE / f"_{folder}"
    if inside.is_dir():
        return inside
    return checkout / folder if (checkout / folder).is_dir() and (checkout / "pyproject.toml").is_file() else None


@cache
def recipe_names() -> dict[str, Path]:
    """Name -> file of every recipe that is shipped or that a plug-in adds, sorted by name. Imports no plug-in."""
    names: dict[str, Path] = {}
    folder = shipped("recipes")
    if folder is not None:
        names |= dict(_named(folder, ""))
    for prefix, point in entry_points("posttrain.recipes").items():
        # Finding a nested package imports only the outer package.
        spec = importlib.util.find_spec(point.value)
        for place in (spec.submodule_search_locations if spec is not None else None) or []:
            names |= dict(_named(Path(place), f"{prefix}/"))
    return dict(sorted(names.items()))


def recipe_file(name: str) -> Path:
    """The file of a recipe: the local file `name`, else the recipe of that name, with or without `.yaml`.

    Raises:
        InputError: there is neither. The message has the nearest names.
    """
    # Unlike methods of Path, these functions return False for names that no file can have.
    local, names, plain = Path(name), recipe_names(), name.removesuffix(".yaml").removesuffix(".yml")
    if os.path.isdir(local) and plain not in names:
        raise InputError(f"{name} is a directory; name a recipe file in it")
    if os.path.isfile(local):
        return local
    if plain in names:
        return names[plain]
    near = difflib.get_close_matches(plain, names, 3, 0.6)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    remedy = f"{hint}name a YAML file or a recipe of `posttrain recipe list`, or write overrides as `key=value`{more()}"
    raise InputError(f"there is no recipe file {name}; {remedy}")


def summary(file: Path) -> str:
    """The first sentence of the comment at the top of a recipe file; empty if it has none."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    sentence, end, _ = " ".join(line.lstrip("# ").strip() for line in comment).partition(". ")
    return sentence + end.strip()


def _named(folder: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    for file in sorted(folder.rglob("*")):
        if file.suffix in _SUFFIXES:
            yield prefix + file.relative_to(folder).with_suffix("").as_posix(), file
