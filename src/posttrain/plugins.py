"""Plug-ins: environments, commands, losses and credits that installed distributions add by entry points.

A distribution declares what it adds in its `pyproject.toml`:

    [project.entry-points."posttrain.environments"]
    maze = "my_package.maze:Maze"

Listing the names of a group reads only package metadata. A plug-in is imported when its name is used, so a plug-in that
cannot be imported does not affect anything else.
"""

import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

from posttrain.errors import InputError

Group = Literal[
    "posttrain.environments",
    "posttrain.commands",
    "posttrain.losses",
    "posttrain.credits",
    "posttrain.recipes",
    "posttrain.stages",
    "posttrain.models",
    "posttrain.parts",
]
"""What entry points may add.

- `posttrain.environments`: the `type` of an environment -> its class, with a `Recipe`.
- `posttrain.commands`: the name of a command -> a `typer.Typer` (a group of commands) or a function (one command). A
  dotted name adds to a group of the command line: `data.mazes` becomes `posttrain data mazes`.
- `posttrain.losses`, `posttrain.credits`: the `type` of a policy loss or credit -> its function, as for
  `posttrain.register_loss` and `posttrain.register_credit`.
- `posttrain.stages`: the name of a stage -> the class of its recipe, as for `posttrain.register_stage`. It is also a command.
- `posttrain.models`: the `model_type` of models that read more than text -> an object whose method `at(path)` returns the
  family of a model, with the methods that `posttrain.models.load` calls, or None for one that reads text only.
- `posttrain.parts`: the `type` of a part of a message -> a function of the part and its place that returns text for it.
- `posttrain.recipes`: the first part of the names of recipes -> the package whose folder holds their YAML files.
"""


_GROUPS = get_args(Group)


class PluginError(InputError):
    """A plug-in could not be imported, or two distributions declare the same name."""


@cache
def entry_points(group: Group) -> Mapping[str, metadata.EntryPoint]:
    """Name -> entry point of every plug-in in `group`, sorted by name. Imports nothing.

    If several distributions declare the same name, the first is listed here, and `load` raises.
    """
    points: dict[str, metadata.EntryPoint] = {}
    for point in sorted(metadata.entry_points(group=group), key=lambda point: point.name):
        points.setdefault(point.name, point)
    return points


@cache
def load(group: Group, name: str) -> Any:
    """Import the plug-in `name` of `group` and return its object.

    Raises:
        PluginError: the import fails, or two distributions declare `name`. The message names the distribution, the
            entry point and, where an optional dependency is missing, the pip command that installs it.
        KeyError: no distribution declares `name`.
    """
    point = entry_points(group)[name]
    values = {other.value for other in metadata.entry_points(group=group, name=name)}
    if len(values) > 1:
        raise PluginError(f"{group}: several distributions declare {name!r} ({', '.join(sorted(values))}); remove one")
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # one that ends the program is no success of the command
        # A partially imported module would make the next attempt fail in a different way.
        sys.modules.pop(point.module, None)
        distribution = point.dist.name if point.dist is not None else "unknown"
        where = f"{group}: {point.name} = {point.value} of the distribution {distribution} cannot be imported"
        missing = (isinstance(error, ModuleNotFoundError) and error.name) or ""
        if missing.split(".")[0] not in ("", point.module.split(".")[0]):
            raise PluginError(f"{where}: no module {missing!r}; run `{pip_command(missing)}`") from error
        reason = " ".join(str(error)[:300].split())
        problem = f"{type(error).__name__}{': ' if reason else ''}{reason}"
        raise PluginError(f"{where}: {problem}; reinstall or remove {distribution}") from error


def model_family(model_type: str, path: str) -> Any:
    """The family (`posttrain.models`) of the model at `path`, a directory or hub id, if it reads more than text; None for a
    language model."""
    known = model_type in entry_points("posttrain.models")
    return load("posttrain.models", model_type).at(path) if known else None


def require_module(module: str, purpose: str) -> Any:
    """Import an optional third-party module and return it.

    Every optional dependency is imported through this function, so the message about a missing one is always the same.
    `purpose` starts the message: a recipe key, a command or a file that needs the module.

    Raises:
        InputError: the module, or one that it imports, is missing or broken. The message has the pip command.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError)
        missing = (error.name if absent else None) or module
        fault = "is not installed" if absent else f"cannot be imported ({error})"
        needs = f"{purpose} needs the package {_normalized(missing.partition('.')[0])}"
        raise InputError(f"{needs}, which {fault}; run `{pip_command(missing)}`") from error


_trusted: ContextVar[tuple[str, ...] | None] = ContextVar("trusted", default=None)


@contextmanager
def trusting(words: Sequence[str]) -> Iterator[None]:
    """In this context, only Python files in the current folder, or whose path is in one of `words`, are executed; others
    are refused.

    A recipe or run from another person may name any file of this machine, and the command line must not execute a file
    that its user did not name. Python callers are not restricted.
    """
    before = _trusted.set(tuple(words))
    try:
        yield
    finally:
        _trusted.reset(before)


def restricted() -> bool:
    """Whether this is inside `trusting`."""
    return _trusted.get() is not None


def trust_also(texts: Iterable[str]) -> None:
    """Trust files that `texts` name like those in the words of `trusting`, until its end."""
    if (words := _trusted.get()) is not None:
        _trusted.set((*words, *texts))


def is_trusted(path: Path) -> bool:
    """Whether the file at `path` may be executed, see `trusting`."""
    words = _trusted.get()
    # A word such as `environment.tools=[own.py:look,own.py:take]` names a file between other signs.
    named = re.compile(rf"(?:^|[=\[,\s'\"]){re.escape(str(path))}(?:$|[:\],\s'\"])")
    inside = path.resolve().is_relative_to(Path.cwd().resolve())
    return words is None or inside or any(named.search(word) for word in words)


def require_trust(path: Path) -> None:
    """Raises InputError if the file at `path` must not be executed, see `trusting`."""
    if not is_trusted(path):
        outside = f"{path} is outside the current folder and no argument names it"
        raise InputError(f"{outside}, so it is not executed; read it, and add --trust to execute it")


def pip_command(module: str) -> str:
    """The pip command that installs the missing `module`, as an extra of posttrain or of a plug-in that declares one."""
    wanted = _normalized(module.partition(".")[0])
    points = metadata.entry_points()
    plugins = {point.dist.name for group in _GROUPS for point in points.select(group=group) if point.dist is not None}
    for distribution in ("posttrain", *sorted(plugins - {"posttrain"})):
        for extra, required in _extras(distribution):
            if required == wanted:
                return f"pip install '{distribution}[{extra}]'"
    return f"pip install {wanted}"


def missing_extras(distribution: str = "posttrain") -> list[str]:
    """The extras of `distribution` with a requirement that is not installed, sorted."""
    installed = {_normalized(str(other.metadata["Name"])) for other in metadata.distributions()}
    return sorted({extra for extra, required in _extras(distribution) if required not in installed})


@cache
def more() -> str:
    """The end of a sentence about a name that does not exist: which of posttrain's plug-ins could bring it. Empty if all
    of them are installed. Rows that cannot be used ask for it thousands of times."""
    missing = set(missing_extras())
    absent = {name for extra, name in _extras("posttrain") if extra in missing and name.startswith("posttrain-")}
    return f"; `pip install ./plugins/*` in a checkout adds {', '.join(sorted(absent))}" if absent else ""


def _extras(distribution: str) -> Iterator[tuple[str, str]]:
    """The extras that `distribution` declares, each with the normalized name of one of its requirements."""
    try:
        requirements = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        requirements = []
    for requirement in requirements:
        name, _, marker = requirement.partition(";")
        extra = re.search(r"""extra\s*==\s*["']([\w.-]+)["']""", marker)
        required = re.match(r"[\w.-]+", name.strip())
        if extra and extra[1] not in _COLLECTIONS and required:
            yield extra[1], _normalized(required[0])


_COLLECTIONS = ("dev", "all", "demo")
"""Extras that combine other extras; too large to recommend for a single module."""


def _normalized(name: str) -> str:
    """A normalized distribution name, so that different spellings compare equal (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
