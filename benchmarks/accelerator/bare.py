"""The recipe's classes where pydantic is not installed: defaults and nothing else, which is all a benchmark needs.

Of posttrain the benchmark imports `models`, `engines`, `losses`, `training.learner`, `training.forward` and
`training.updater`. Beside torch, transformers and numpy they want pydantic, for the recipe's parts.
"""

import sys
from inspect import get_annotations
from types import ModuleType, SimpleNamespace
from typing import Any

_REQUIRED = object()


class BaseModel:
    """A class whose fields are its annotations: values by keyword, else the default. Nothing is checked."""

    model_fields: dict[str, Any] = {}

    def __init_subclass__(cls, **settings: Any) -> None:
        marks = {name: getattr(kind, "__metadata__", ()) for name, kind in get_annotations(cls).items()}
        kinds = {name: kind.__origin__ if marks[name] else kind for name, kind in get_annotations(cls).items()}
        named = {name: SimpleNamespace(annotation=kinds[name], metadata=marks[name]) for name in kinds}
        cls.model_fields = {**cls.model_fields, **named}

    def __init__(self, **values: Any) -> None:
        for name in self.model_fields:
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


class _Unused:
    """Stands for what the recipe's classes name when they are defined and a benchmark never uses: validators, tags, errors."""

    def __init__(self, *values: Any, **settings: Any) -> None: ...

    def __call__(self, function: Any) -> Any:
        return function

    def __class_getitem__(cls, item: Any) -> Any:
        return item


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unused


def use_stand_in() -> bool:
    """Stand in for pydantic where it is missing; says whether it is."""
    try:
        import pydantic  # noqa: F401
    except ImportError:
        module: Any = _Module("pydantic")
        module.BaseModel, module.ConfigDict, module.Field = BaseModel, dict, _field
        module.ValidationError = ValidationError
        module.model_validator = module.field_validator = _decorator
        sys.modules["pydantic"] = module
        for name in ("pydantic.fields", "pydantic_core"):
            sys.modules[name] = _Module(name)
        return True
    return False
