"""Find the component that a recipe names by `type`: a built-in name, `module:Class`, or `path/to/file.py`.

Components are named by text and imported on demand, so a recipe can be read without torch, and your own environments
work like the built-in ones. A `Factory` creates components in this process or, in a cluster run, in another process.
"""

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, Generic, ParamSpec, TypeVar

from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError, ValidationInfo
from pydantic_core import PydanticCustomError

from posttrain.errors import InputError
from posttrain.plugins import Group, PluginError, entry_points, load, more, require_trust
from posttrain.recipe.base import BaseConfig, Executes, validated
from posttrain.recipe.sources import walk

_GROUP: Group = "posttrain.environments"
_OF_FILES = "posttrain_user_"
"""Prefix of the names of modules that `module_of_file` loads."""
P = ParamSpec("P")
T = TypeVar("T")

ENVIRONMENTS: dict[str, Any] = {
    "bandit": "posttrain.environments.bandit:Bandit",
    "frozen_lake": "posttrain.environments.frozen_lake:FrozenLake",
    "sokoban": "posttrain.environments.sokoban:Sokoban",
    "text_task": "posttrain.environments.text_task:TextTask",
}
"""Name -> the class of an environment, or `module:Class` for the built-in ones, which are imported on demand.
`register_environment` adds to it; for those of plug-ins, see `environment_names`."""
_UNTYPED = "environment.type is missing; name an environment, for example `environment.type=bandit`"
_UNKNOWN = "posttrain.environments.unknown:Unknown"
_GAMES = ("bandit", "frozen_lake", "sokoban")
"""Built-in environments whose recipes name neither code nor files."""


class EnvironmentRecipe(BaseConfig):
    """Keys that every environment has; an environment's own `Recipe` class adds to them."""

    scoring: ClassVar[frozenset[str]] = frozenset(
        {"reward", "judge", "verifier", "penalty", "format.penalty", "success_reward", "success_return"}
    )
    """The keys and sections that change how answers are scored, and not the tasks: an audit may differ in them."""

    type: Executes
    """A built-in name, `module:Class`, or `path/to/file.py` (with `:Class` if the file defines several)."""
    max_turns: int = Field(1, ge=1)
    """Maximum number of turns of an episode."""

    def other_tasks(self, other: "EnvironmentRecipe") -> str | None:
        """The first key, not of `scoring`, in which `other` differs, so that a seed may be another task there; None if
        there is none."""
        one, two = (
            {
                ".".join(path): value
                for path, value in walk(each.model_dump(mode="json"))
                if not (value and type(value) is dict)
            }
            for each in (self, other)
        )
        changed = [key for key in {**one, **two} if one.get(key) != two.get(key)]
        return next((key for key in changed if not any(f"{key}.".startswith(f"{own}.") for own in self.scoring)), None)

    @property
    def rows_key(self) -> str | None:
        """The recipe key of the files whose rows are the tasks; None if tasks are generated from seeds."""
        return None

    @property
    def reward_name(self) -> str:
        """What gives the rewards, for tables; empty if only a reward model does."""
        return self.type


def _by_type(value: Any, info: ValidationInfo) -> Any:
    """The typed recipe of a mapping with a `type`; for pydantic. Anything else is returned unchanged."""
    if not isinstance(value, dict):
        return value
    try:
        name = value.get("type")
        if not isinstance(name, str):
            problem = f"is {json.dumps(name)}; it must be text"
            raise InputError(f"environment.type {problem}" if "type" in value else _UNTYPED)
        return validated(environment_class(name).Recipe, value, info)
    except ValidationError:
        raise
    except InputError as error:
        raise PydanticCustomError("environment", "{problem}", {"problem": str(error)}) from error
    except (Exception, SystemExit) as error:
        problem = f"environment.type: {name} failed to load with {type(error).__name__}: {error}; correct that file"
        raise PydanticCustomError("environment", "{problem}", {"problem": problem}) from error


AnyEnvironment = Annotated[SerializeAsAny[EnvironmentRecipe], BeforeValidator(_by_type)]
"""The recipe of an environment, whose class depends on its `type`."""

_looking: ContextVar[bool] = ContextVar("looking", default=False)


@contextmanager
def looking() -> Iterator[None]:
    """Inside the block, environments that are neither games of this package nor plug-ins are not imported:
    `environment_class` returns a class that accepts all keys and cannot be played. Run directories may come from other
    people, and reading one must not execute the code that it names."""
    before = _looking.set(True)
    try:
        yield
    finally:
        _looking.reset(before)


def register_environment(name: Any) -> Any:
    """Class decorator that makes an environment available as `environment.type: name` in this process.

        @posttrain.register_environment("maze")
        class Maze(posttrain.Environment): ...

    As a function, `register_environment(Maze)` registers the class under the name by which other processes import it
    (`module:Class` or `path/to/file.py:Class`), and returns that name. InputError for the name of a built-in
    environment.
    """
    if isinstance(name, type):
        place = place_of(name)
        ENVIRONMENTS[place] = name
        return place
    if isinstance(ENVIRONMENTS.get(name), str):
        raise InputError(f"there is a built-in environment {name!r}; register yours under another name")

    def registered(environment: T) -> T:
        ENVIRONMENTS[name] = environment
        return environment

    return registered


def place_of(definition: Any) -> str:
    """Where a function or class is defined: `module:name`, or `path/to/file.py:name` for a script or a loaded file."""
    module = sys.modules.get(definition.__module__)
    file = getattr(module, "__file__", None)
    script = definition.__module__ == "__main__" or definition.__module__.startswith(_OF_FILES)
    return f"{file if file and script else definition.__module__}:{definition.__qualname__}"


def environment_names() -> list[str]:
    """Names of the environments that are built in, registered or added by plug-ins, sorted. Imports none of them."""
    return sorted({*(name for name in ENVIRONMENTS if ":" not in name), *entry_points(_GROUP)})


def environment_classes() -> dict[str, Any]:
    """Name -> class of every environment of `environment_names`, without plug-ins that cannot be imported."""
    classes = {}
    for name in environment_names():
        try:
            classes[name] = environment_class(name)
        except PluginError:
            continue
    return classes


def environment_class(type_name: str) -> Any:
    """The `Environment` subclass that `type_name` names. Raises `InputError` if there is none."""
    if type_name not in ENVIRONMENTS and type_name in entry_points(_GROUP):
        return load(_GROUP, type_name)
    where, start = ENVIRONMENTS.get(type_name, type_name), "environment.type: "
    if isinstance(where, type):
        return where
    if _looking.get() and type_name not in _GAMES:
        where = _UNKNOWN
    place, colon, class_name = where.partition(":")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise InputError(f"{start}there is no file {place}; correct the path")
        return _class_in(module_of_file(Path(place)), class_name, where)
    if not colon:
        if Path(f"{where}.py").is_file():
            raise InputError(f"{start}{where} is not a built-in environment; write {where}.py for that file")
        names = environment_names()
        near = difflib.get_close_matches(type_name.casefold(), names, 1, 0.6)
        hint = f" (did you mean {near[0]}?)" if near else ""
        use = f"use one of {', '.join(names)}, `module:Class`, or the path of a .py file{more()}"
        raise InputError(f"{start}there is no environment {type_name!r}{hint}; {use}")
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = f"module {error.name!r} of {type_name!r} is not installed"
        raise InputError(f"{start}{missing}; install it, or correct the name") from error
    return _class_in(module, class_name, where)


def environment_recipe(values: dict[str, Any]) -> EnvironmentRecipe:
    """The validated recipe of the environment that `values["type"]` names."""
    if "type" not in values:
        raise InputError(_UNTYPED)
    return environment_class(values["type"]).Recipe(**values)


def module_of_file(path: Path) -> ModuleType:
    """The Python file at `path` as a module, executed once per process.

    Raises:
        InputError: inside `trusting`, the file is neither in the current folder nor named by the command.
    """
    require_trust(path)
    file = path.resolve()
    name = f"{_OF_FILES}{file.stem}"
    if getattr(sys.modules.get(name), "__file__", str(file)) != str(file):
        # Files with the same name in different folders are different modules.
        name += f"_{hashlib.blake2b(str(file).encode(), digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec: Any = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, SystemExit):
            raise InputError(
                f"{path} ends the program when it is imported (SystemExit: {error}); put its commands under "
                "`if __name__ == '__main__':`"
            ) from error
        raise
    return module


def _class_in(module: Any, class_name: str, where: str) -> Any:
    classes = {class_name: getattr(module, class_name, None)}
    if not class_name:
        defined = {name: v for name, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__}
        classes = {name: v for name, v in defined.items() if isinstance(v, type) and hasattr(v, "Recipe")}
        classes = {name: v for name, v in classes.items() if not inspect.isabstract(v)} or classes
    start = f"environment.type: {where}"
    if not classes:
        raise InputError(f"{start} has no environment; derive a class from posttrain.Environment")
    name, *others = classes
    if others:
        raise InputError(f"{start} has the environments {', '.join(classes)}; name one as {where}:{name}")
    only = classes[name]
    if only is None:
        raise InputError(f"{start}: there is no class {name}; correct the name")
    if not isinstance(only, type) or not hasattr(only, "Recipe"):
        raise InputError(f"{start}: {name} is not an environment; derive it from posttrain.Environment")
    if missing := sorted(getattr(only, "__abstractmethods__", ())):
        raise InputError(f"{start}: class {name} has no method {' and no method '.join(missing)}; add it")
    return only


class Factory(Generic[P, T]):
    """A function that creates a component in this process. Inside `placed_by`, another function creates it, for example
    on a worker of a cluster."""

    def __init__(self, here: Callable[P, T]) -> None:
        self.here = here
        self._elsewhere: Callable[..., T] | None = None
        functools.update_wrapper(self, here)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return (self._elsewhere or self.here)(*args, **kwargs)

    @contextmanager
    def placed_by(self, maker: Callable[..., T]) -> Iterator[None]:
        """Inside the block, `maker` creates the component, in every thread of this process."""
        before, self._elsewhere = self._elsewhere, maker
        try:
            yield
        finally:
            self._elsewhere = before
