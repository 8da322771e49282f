"""Environments from plain arguments."""

from typing import Any

from posttrain.environments.protocol import Environment, EnvironmentFactory
from posttrain.errors import InputError
from posttrain.recipe.components import environment_class, register_environment
from posttrain.recipe.compose import section


def make_env(environment: str | type[Environment], **keys: Any) -> EnvironmentFactory:
    """A factory of environments.

        env = make_env("frozen_lake", size=4)
        env = make_env("path/to/file.py:MyEnvironment")
        env = make_env(MyEnvironment)
        observation = env().reset(seed=0)

    Args:
        environment: a built-in or registered name, `module:Class`, `path/to/file.py` (with `:Class` if it holds several),
            or an `Environment` subclass.
        keys: keys of the environment's `Recipe`, as in the `environment` section of a recipe.

    Raises:
        InputError: there is no such environment, or a key is wrong.
    """
    if not isinstance(environment, str) and not (
        isinstance(environment, type) and issubclass(environment, Environment)
    ):
        raise InputError(f"the argument `environment` is {environment!r:.60}; pass a name or a subclass of Environment")
    name = register_environment(environment) if isinstance(environment, type) else environment
    return EnvironmentFactory(section(environment_class(name).Recipe, type=name, **keys))
