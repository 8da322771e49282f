"""The recipe's classes where pydantic is not installed: defaults and nothing else, which is all a benchmark needs.

Of posttrain the benchmark imports `models`, `engines`, `losses`, `training.learner`, `training.forward` and
`training.updater`. Beside torch, transformers and numpy they want pydantic, for the recipe's parts.
"""

import sys
from inspect import get_annotations
from types import ModuleType
from typing import Any

_REQUIRED = object()


class BaseModel:
    """A class whose fields are its annotations: values by keyword, else the default. Nothing is checked."""

    def __init__(self, **values: Any) -> None:
        names = [name for base in reversed(type(self).__mro__) for name in get_annotations(base)]
        for name in dict.fromkeys(names):
            value = values.pop(name, getattr(type(self), name, _REQUIRED))
            if value is _REQUIRED:
                raise TypeError(f"{type(self).__name__} needs {name}")
            setattr(self, name, value)
        if values:
            raise TypeError(f"{type(self).__name__} has no {', '.join(values)}")


class ValidationError(ValueError):
    """Never raised, for nothing is checked."""


def _field(default: Any = _REQUIRED, **constraints: Any) -> Any:
    return default


def _decorator(*fields: Any, **settings: Any) -> Any:
    return lambda function: function


def use_stand_in() -> bool:
    """Stand in for pydantic where it is missing; says whether it is."""
    try:
        import pydantic  # noqa: F401
    except ImportError:
        module: Any = ModuleType("pydantic")
        module.BaseModel, module.ConfigDict, module.Field = BaseModel, dict, _field
        module.ValidationError, module.AfterValidator = ValidationError, _field
        module.model_validator = module.field_validator = _decorator
        sys.modules["pydantic"] = module
        return True
    return False
