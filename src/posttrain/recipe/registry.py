"""Extensible sections of a recipe: policy losses and credits, selected by `type`.

Built-in kinds, those of users and those of plug-ins register in the same way, in one of two forms: a class of the section
with a method `compute`, or a function whose keyword-only parameters are the settings. From a function, the section of the
recipe is derived, so its keys are validated like those of a class.
"""

import importlib
import inspect
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ValidationInfo, create_model

from posttrain.plugins import Group, PluginError, entry_points, load
from posttrain.recipe.base import BaseConfig, Text, unknown_kind, validated

REGISTRIES: dict[type[BaseConfig], "Registry"] = {}
"""Base class of a section -> its kinds."""
F = TypeVar("F", bound=Callable[..., Any])


class Section(BaseConfig):
    """A section of a recipe whose keys depend on its `type`."""

    type: Text
    """The kind. The other keys depend on it."""
    inputs: ClassVar[frozenset[str]] = frozenset()
    """Names of the parameters of `compute`."""

    def compute(self, *arguments: Any, **named: Any) -> Any:
        """The computation with this section's settings; every kind has its own."""
        raise NotImplementedError

    def problems(self, recipe: Any) -> list[str]:
        """One sentence for each key of this section that does not fit to the rest of the `recipe`, an error."""
        return []

    def warnings(self, recipe: Any) -> list[str]:
        """One sentence for each unusual value of this section in `recipe`."""
        return []


class Registry:
    """The kinds of one section: built in, registered in this process, or added by plug-ins."""

    def __init__(self, key: str, group: Group, base: type[Section], built_in: tuple[str, ...]) -> None:
        """`key`: the dotted key of the section, for messages; `group`: the entry points that add kinds; `built_in`: the
        modules that register the kinds of this package, imported when a kind is first looked up."""
        self.key = key
        self.group: Group = group
        self.base = base
        self._kinds: dict[str, type[Section]] = {}
        self._modules = built_in
        self._loaded = False
        REGISTRIES[base] = self

    def names(self) -> list[str]:
        """The types of all kinds, built-in ones first. Imports no plug-in."""
        self._load()
        return list(dict.fromkeys([*self._kinds, *entry_points(self.group)]))

    def sections(self) -> list[type[Section]]:
        """The sections of all kinds that are imported, in the order of `names`."""
        self._load()
        return list(dict.fromkeys(self._kinds.values()))

    def load_plugins(self) -> None:
        """Import all plug-ins of the group, except those that cannot be imported."""
        for name in entry_points(self.group):
            with suppress(PluginError):
                self.find(name)

    def find(self, name: str) -> type[Section] | None:
        """The section of the type `name`, imported if a plug-in adds it; None if there is none."""
        self._load()
        if name not in self._kinds and name in entry_points(self.group):
            added = load(self.group, name)
            if name not in self._kinds:
                self.register(name)(added)
        return self._kinds.get(name)

    def make(self, name: str) -> Any:
        """The section of the built-in type `name` with its defaults."""
        section = self.find(name)
        assert section is not None
        return section.model_validate({"type": name})

    def register(self, *names: str, **declared: Any) -> Callable[[F], F]:
        """Decorator of a section, or of a function for one: adds the kind `names`, a section's own types.

        `declared`: class variables of the section, such as `metrics`. Empty ones are left as they are.

        Raises:
            ValueError: one of `names` is a built-in kind, or a parameter cannot be a key of a recipe.
        """

        def registered(kind: F) -> F:
            built_in = kind.__module__ in self._modules
            if not built_in:
                self._load()
            for name in names:
                if not built_in and name in self._kinds and self._kinds[name].__module__ in self._modules:
                    raise ValueError(f"there is a built-in {self.key} {name!r}; register yours under another name")
            section: type[Section] = kind if isinstance(kind, type) else section_of(names, kind, self.base)
            section.inputs = frozenset(inspect.signature(section.compute).parameters)
            for name, value in declared.items():
                if value:
                    setattr(section, name, value)
            self._kinds |= dict.fromkeys(names, section)
            return kind

        return registered

    def validate(self, value: Any, info: ValidationInfo) -> Any:
        """The typed section of a mapping with a `type`; for pydantic. Anything else is returned unchanged."""
        if not isinstance(value, Mapping) or "type" not in value:
            return value
        section = self.find(name := str(value["type"]))
        if section is None:
            raise unknown_kind("type", name, self.names())
        return validated(section, value, info)

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        for module in self._modules:
            importlib.import_module(module)
        order = {module: number for number, module in enumerate(self._modules)}
        last = len(order)
        self._kinds = dict(sorted(self._kinds.items(), key=lambda kind: order.get(kind[1].__module__, last)))


def section_of(names: tuple[str, ...], function: Callable[..., Any], base: type[Section]) -> type[Section]:
    """A subclass of `base` whose keys are the keyword-only parameters of `function`."""
    name, parameters = names[0], inspect.signature(function).parameters
    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {"type": (Literal[names], name)}
    for parameter in parameters.values():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        if parameter.name in base.model_fields or hasattr(BaseModel, parameter.name):
            raise ValueError(f"{name}: the setting {parameter.name!r} has the name of another key; rename it")
        if parameter.name not in hints:
            raise ValueError(f"{name}: the setting {parameter.name!r} has no type annotation; add one")
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    doc = inspect.getdoc(function) or f"The {name} that {function.__module__} registers."
    title = "".join(word.capitalize() for word in name.replace("-", "_").split("_")) + base.__name__
    section: type[Section] = create_model(title, __base__=base, __module__=function.__module__, __doc__=doc, **fields)
    section.model_fields["type"].description = f"`{name}`: {doc.splitlines()[0]}"
    settings = [field for field in fields if field != "type"]
    if not settings:
        section.compute = staticmethod(function)  # type: ignore[method-assign]
        return section

    def compute(self: Section, *arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named, **{setting: getattr(self, setting) for setting in settings})

    compute.__signature__ = inspect.Signature([p for p in parameters.values() if p.name not in settings])  # type: ignore[attr-defined]
    section.compute = compute  # type: ignore[method-assign]
    return section
