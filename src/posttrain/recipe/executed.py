"""What a recipe executes on this machine: Python files, functions of modules, programs, and the code of models.

The recipe of a run may be a stranger's, and resuming the run would execute it.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.errors import InputError
from posttrain.plugins import is_trusted, restricted

_FUNCTIONS = {"type", "id", "in_process", "reward", "function", "tools"}
"""Keys whose texts may be `path/to/file.py`, `path/to/file.py:name` or `module:name`."""
_OF_MODULE = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_][\w.-]*")


def executed(values: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """(key, value) of everything in the values of a recipe that names code, in their order."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        path = (*above, str(key))
        named = key if isinstance(values, dict) else above[-1]
        if isinstance(value, dict | list):
            yield from executed(value, path)
        elif (named == "trust_remote_code" and value is True) or (named == "command" and isinstance(value, str)):
            yield ".".join(path), str(value)
        elif named in _FUNCTIONS and isinstance(value, str):
            module = _OF_MODULE.fullmatch(value)
            if ".py" in value or (module is not None and not module[1].startswith("posttrain.")):
                yield ".".join(path), value


def require_trust_of_run(recipe_file: Path, values: dict[str, Any]) -> None:
    """Raises InputError, which lists what the recipe of a run would execute, unless the command line may execute it.

    It may execute Python files of the current folder that are outside of the run, and everything with `--trust`.
    """
    if not restricted():
        return
    refused = []
    for key, value in executed(values):
        file = Path(value.partition(".py")[0] + ".py")
        in_run = file.resolve().is_relative_to(recipe_file.parent.resolve())
        if ".py" not in value or key.endswith(".command") or in_run or not is_trusted(file):
            refused.append(f"{key}: {value}")
    if refused:
        raise InputError(
            f"{recipe_file} would execute code that is not in Python files of the current folder, or that comes with the run: "
            f"{', '.join(refused)}; read it, and add --trust to execute it"
        )
