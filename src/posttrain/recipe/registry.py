"""Extensible sections of a recipe: policy losses and credits, selected by `type`.

A registered kind is a pure function with keyword-only settings. Its section of the recipe is derived from the signature,
so its keys are validated like those of the built-in kinds.
"""

import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ValidationInfo, create_model
from pydantic_core import PydanticKnownError

from posttrain.plugins import Group, PluginError, entry_points, load
from posttrain.recipe.base import BaseConfig, Text

REGISTRIES: dict[type[BaseConfig], "Registry"] = {}
"""Base class of a section -> its kinds."""


class Section(BaseConfig):
    """A section of a recipe whose keys depend on its `type`."""

    type: Text
    """The kind. The other keys depend on it."""
    function: ClassVar[Callable[..., Any] | None] = None
    """The function of a registered kind; None for the built-in kinds."""
    settings_of_function: ClassVar[tuple[str, ...]] = ()
    """Names of its keyword-only parameters."""

    def call(self, *arguments: Any, **named: Any) -> Any:
        """Call the function of a registered kind with this section's settings and the `named` arguments that it accepts."""
        assert self.function is not None
        parameters = inspect.signature(self.function).parameters
        settings = {name: getattr(self, name) for name in self.settings_of_function}
        return self.function(*arguments, **{name: named[name] for name in named if name in parameters}, **settings)


class Registry:
    """The kinds of one section: built in, registered in this process, or added by plug-ins."""

    def __init__(self, key: str, group: Group, base: type[Section]) -> None:
        """`key`: the dotted key of the section, for messages; `group`: the entry points that add kinds."""
        self.key = key
        self.group: Group = group
        self.base = base
        self._kinds: dict[str, type[Section]] = {}
        self._built_in: frozenset[str] = frozenset()
        REGISTRIES[base] = self

    def build_in(self, *sections: type[Section]) -> None:
        """Add the built-in kinds. A section may serve several types."""
        for section in sections:
            self._kinds |= dict.fromkeys(typing.get_args(section.model_fields["type"].annotation), section)
        self._built_in = frozenset(self._kinds)

    def names(self) -> list[str]:
        """The types of all kinds, built-in ones first. Imports no plug-in."""
        return list(dict.fromkeys([*self._kinds, *entry_points(self.group)]))

    def sections(self) -> list[type[Section]]:
        """The sections of all kinds that are imported, in the order of `names`."""
        return list(dict.fromkeys(self._kinds.values()))

    def load_plugins(self) -> None:
        """Import all plug-ins of the group, except those that cannot be imported."""
        for name in entry_points(self.group):
            try:
                self.find(name)
            except PluginError:
                continue

    def find(self, name: str) -> type[Section] | None:
        """The section of the type `name`, imported if a plug-in adds it; None if there is none."""
        if name not in self._kinds and name in entry_points(self.group):
            added = load(self.group, name)
            if name not in self._kinds:
                self.add(name, added)
        return self._kinds.get(name)

    def add(self, name: str, function: Callable[..., Any]) -> None:
        """Add the kind `name`, whose keys are the keyword-only parameters of `function` and the keys of the base section.

        Raises:
            ValueError: `name` is a built-in kind, or a parameter cannot be a key of a recipe.
        """
        if name in self._built_in:
            raise ValueError(f"there is a built-in {self.key} {name!r}; register yours under another name")
        self._kinds[name] = section_of(name, function, self.base)

    def validate(self, value: Any, info: ValidationInfo) -> Any:
        """The typed section of a mapping with a `type`; for pydantic. Anything else is returned unchanged."""
        if not isinstance(value, Mapping) or "type" not in value:
            return value
        section = self.find(str(value["type"]))
        if section is None:
            expected = ", ".join(f"'{name}'" for name in self.names())
            raise PydanticKnownError(
                "union_tag_invalid", {"discriminator": "'type'", "tag": str(value["type"]), "expected_tags": expected}
            )
        if info.mode == "json":
            return section.model_validate_json(json.dumps(value), strict=True)
        return section.model_validate(dict(value))


def section_of(name: str, function: Callable[..., Any], base: type[Section]) -> type[Section]:
    """A subclass of `base` whose keys are the keyword-only parameters of `function`."""
    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {"type": (Literal[name], name)}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        if parameter.name in base.model_fields or hasattr(BaseModel, parameter.name):
            raise ValueError(f"{name}: the setting {parameter.name!r} has the name of another key; rename it")
        if parameter.name not in hints:
            raise ValueError(f"{name}: the setting {parameter.name!r} has no type annotation; add one")
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    doc = inspect.getdoc(function) or f"The {name} that {function.__module__} registers."
    section: type[Section] = create_model(
        "".join(word.capitalize() for word in name.replace("-", "_").split("_")) + base.__name__,
        __base__=base,
        __module__=function.__module__,
        __doc__=doc,
        **fields,
    )
    section.model_fields["type"].description = f"`{name}`: {doc.splitlines()[0]}"
    section.function = staticmethod(function)
    section.settings_of_function = tuple(field for field in fields if field != "type")
    return section
