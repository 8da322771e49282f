"""The code that a recipe executes on this machine: Python files, functions, programs, tasks of lm-eval, code of models.

The recipe of a run may come from an untrusted source, and resuming the run would execute it.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.errors import InputError
from posttrain.plugins import is_trusted, restricted

_FUNCTIONS = {"type", "id", "in_process", "reward", "function", "tools"}
"""Keys whose texts may be `path/to/file.py`, `path/to/file.py:name` or `module:name`."""
_OF_MODULE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.-]*")
_HARMLESS = {f"posttrain.data.rationales.verifier:{name}" for name in ("reward", "scores")}
"""Functions of this package that may be a reward. Others read files, run commands or import what their arguments name."""


def executed(values: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, str, Path | None]]:
    """(key, value, file) of everything in the values of a recipe that names code, in their order; no file for other code."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        path = (*above, str(key))
        named = str(key) if isinstance(values, dict) else above[-1]
        if isinstance(value, dict | list):
            yield from executed(value, path)
        elif (named == "trust_remote_code" and value is True) or (named == "command" and isinstance(value, str)):
            yield ".".join(path), str(value), None
        elif isinstance(value, str):
            yield from ((".".join(path), text, file) for text, file in _code(str(named), value))


def _code(key: str, value: str) -> Iterator[tuple[str, Path | None]]:
    if key == "include_path":
        yield value, Path(value)
    if key == "tasks":  # templates of lm-eval's tasks are not confined
        names = (name.strip() for name in value.split(","))
        yield from ((name, Path(name)) for name in names if name.endswith((".yaml", ".yml")))
    if key in _FUNCTIONS:
        # Folders, such as that of a run, may have `.py` and colons in their names: every end of a file's name counts.
        named = [Path(value[: found.end()]) for found in re.finditer(r"\.py(?=:|$)", value)]
        yield from ((value, file) for file in named)
        if not named and (".py" in value or (_OF_MODULE.fullmatch(value) and value not in _HARMLESS)):
            yield value, None


def require_trust_of_run(recipe_file: Path, values: dict[str, Any]) -> None:
    """Raises InputError, which lists what the recipe of a run would execute, unless the command line may execute it.

    It may execute files of the current folder that are outside of the run, and everything with `--trust`.
    """
    if not restricted():
        return
    run = recipe_file.parent.resolve()
    refused = [
        f"{key}: {text}"
        for key, text, file in executed(values)
        if file is None or file.resolve().is_relative_to(run) or not is_trusted(file)
    ]
    if refused:
        raise InputError(
            f"{recipe_file} would execute code that is not in files of the current folder, or that comes with the run: "
            f"{', '.join(dict.fromkeys(refused))}; read it, and add --trust to execute it"
        )
