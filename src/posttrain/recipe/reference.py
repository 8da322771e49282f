"""The keys of a recipe for users: dotted name, allowed values, default, description.

All of it is derived from the schema, so the reference and the error messages always match it.
"""

import ast
import functools
import inspect
import itertools
import json
import sys
import types
import typing
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Union

from pydantic import SerializeAsAny
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from posttrain.recipe.base import NAME, BaseConfig, Mark
from posttrain.recipe.components import EnvironmentRecipe, environment_classes
from posttrain.recipe.metrics import Metric
from posttrain.recipe.registry import REGISTRIES


@dataclass(frozen=True)
class Key:
    """One key of a recipe. `variant`: the `type` of its section that has the key; empty: every type."""

    path: str
    allowed: str
    default: str
    description: str
    variant: str = ""


def load_plugins() -> None:
    """Import the plug-ins that add kinds of losses and credits, so that their keys are listed."""
    for registry in REGISTRIES.values():
        registry.load_plugins()


def keys_of(
    part: type[BaseConfig],
    prefix: str = "",
    defaults: BaseConfig | None = None,
    variant: str = "",
    environments: bool = True,
) -> Iterator[Key]:
    """Every key of `part` and of the sections in it, depth first; `defaults`: an instance with the default values, if
    there is one. Without `environments`, those of the environment are left out, and none is imported.

    A name that the user chooses is `*`.
    """
    for name, info in part.model_fields.items():
        path = f"{prefix}{name}"
        default = info.get_default(call_default_factory=True)
        about = info.description or docstrings(part).get(name, "")
        if defaults is not None:
            default = getattr(defaults, name, PydanticUndefined)
        sections = sections_of(info.annotation)
        if EnvironmentRecipe in sections:
            yield Key(path, "a section", _text(default), about, variant)
            if prefix or not environments:  # those of `evaluation.environment` are the same
                continue
            yield next(key for key in keys_of(EnvironmentRecipe, f"{path}.") if key.path == f"{path}.type")
            owners: dict[Key, list[str]] = {}  # a key that several environments share is listed once
            for owner, environment in environment_classes().items():
                for key in keys_of(environment.Recipe, f"{path}."):
                    if key.path != f"{path}.type":
                        owners.setdefault(key, []).append(owner)
            yield from (replace(key, variant=", ".join(names)) for key, names in owners.items())
        elif typing.get_origin(info.annotation) is dict and (named := sections_of(typing.get_args(info.annotation)[1])):
            yield Key(path, "a section", _text(default), about, variant)
            for section in named:
                yield from keys_of(section, f"{path}.*.", None, variant)
        elif not sections:
            marks = (mark for part in (info.annotation, *info.metadata) for mark in _marks(part))
            mark = next((f" Needs trust: {mark.does}." for mark in marks if mark.needs_trust), "")
            yield Key(path, allowed(info), _text(default), f"{about}{mark}", variant)
        else:
            if len(sections) > 1 or default is None:
                about = about or (sections[0].__doc__ or "").strip()
                yield Key(path, allowed(info), _text(default), about, variant)
            for section in sections:
                instance = default if isinstance(default, section) else None
                tag = ", ".join(tags_of(section)) if len(sections) > 1 else ""
                yield from keys_of(section, f"{path}.", instance, tag or variant)


@functools.cache
def docstrings(section: type[BaseConfig]) -> dict[str, str]:
    """The docstring below each key of a section, from its source; keys without one are missing."""
    found: dict[str, str] = {}
    for part in (part for part in reversed(section.__mro__) if issubclass(part, BaseConfig)):
        body = _classes(part.__module__).get(part.__qualname__, [])
        for field, doc in itertools.pairwise(body):
            match field, doc:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = inspect.cleandoc(text)
    return found


@functools.cache
def _classes(module: str) -> dict[str, list[ast.stmt]]:
    """The statements of every class in the source of `module`, by qualified name; none for a module without source."""
    found: dict[str, list[ast.stmt]] = {}

    def collect(node: ast.AST, prefix: str) -> None:
        for one in ast.iter_child_nodes(node):
            inside = prefix
            if isinstance(one, ast.ClassDef):
                found[f"{prefix}{one.name}"], inside = one.body, f"{prefix}{one.name}."
            elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                inside = f"{prefix}{one.name}.<locals>."
            if not isinstance(one, ast.expr):
                collect(one, inside)

    with suppress(OSError, TypeError):  # made by a program
        collect(ast.parse(inspect.getsource(sys.modules[module])), "")
    return found


def metrics_of(part: type[BaseConfig]) -> list[Metric]:
    """The metrics that `part` and the sections in it declare, each name once, those of outer sections first."""
    metrics: dict[str, Metric] = {}
    sections = [part]
    for section in sections:
        for base in section.__mro__:
            for metric in vars(base).get("metrics", ()):
                metrics.setdefault(metric.name, metric)
        inside = [inner for info in section.model_fields.values() for inner in sections_of(info.annotation)]
        sections += [inner for inner in dict.fromkeys(inside) if inner not in sections]
    return list(metrics.values())


def sections_of(annotation: Any) -> list[type[BaseConfig]]:
    """The `BaseConfig` classes that `annotation` admits, in order; empty for plain values. Plug-ins count once they are
    imported."""
    origin = typing.get_origin(annotation)
    if origin in (Annotated, SerializeAsAny):
        return sections_of(typing.get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [section for member in typing.get_args(annotation) for section in sections_of(member)]
    if annotation in REGISTRIES:
        return list(REGISTRIES[annotation].sections())
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseConfig) else []


def _marks(part: Any) -> Iterator[Mark]:
    """The marks in an annotation, outside of its sections."""
    if isinstance(part, Mark):
        yield part
    for member in typing.get_args(part):
        yield from _marks(member)


def tags_of(section: type[BaseConfig]) -> list[str]:
    """The values of `type` that select `section`; empty if it has none."""
    info = section.model_fields.get("type")
    return [str(tag) for tag in typing.get_args(info.annotation)] if info is not None else []


def allowed(info: FieldInfo) -> str:
    """The allowed values of a field in words: kind and bounds."""
    words = _kind(info.annotation)
    nullable = words.removesuffix(" or null")
    return _bounded(nullable, info) + (", or null" if nullable != words else "")


_PATTERNS = {
    NAME: "of up to 200 letters, digits, `.`, `_` and `-`, the first a letter or digit",
    r"^https?://\S+$": "that begins with http:// or https://",
}
"""Pattern of a text -> what it allows, in words."""


def _bounded(words: str, info: FieldInfo) -> str:
    """`words` with the bounds of `info`."""
    limits = []
    for name, phrase in (("ge", "{} or more"), ("gt", "above {}"), ("le", "at most {}"), ("lt", "below {}")):
        for limit in (getattr(bound, name) for bound in info.metadata if hasattr(bound, name)):
            limits.append(phrase.format(f"{limit:g}" if isinstance(limit, float) else limit))
    for pattern in (bound.pattern for bound in info.metadata if getattr(bound, "pattern", None)):
        limits.append(_PATTERNS.get(pattern, f"of the form {pattern}"))
    separator = ", " if limits and limits[0].endswith(" or more") else " "
    return separator.join([words, " and ".join(limits)] if limits else [words])


def _kind(annotation: Any) -> str:
    origin, members = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Annotated, SerializeAsAny):
        info = next((bound for bound in members[1:] if isinstance(bound, FieldInfo)), None)
        return _kind(members[0]) if info is None else _bounded(_kind(members[0]), info)
    if origin is Literal:
        return either([str(member) for member in members])
    if origin in (Union, types.UnionType):
        if sections := sections_of(annotation):
            tags = [tag for section in sections for tag in tags_of(section)] if len(sections) > 1 else []
            words = f"a section with `type` {either(tags)}" if tags else "a section"
        else:
            kinds = [_kind(member) for member in members if member is not type(None)]
            words = (", or " if any("," in kind for kind in kinds) else " or ").join(kinds)
        return f"{words} or null" if type(None) in members else words
    if origin is list or members[1:] == (...,):
        literal = typing.get_origin(members[0]) is Literal
        return f"a list of {_kind(members[0]) if literal else _plural(members[0])}"
    if origin is tuple:
        return f"a list of {len(members)} {_plural(members[0])}"
    if sections_of(annotation):
        return "a section"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(annotation, "a value")


def _plural(annotation: Any) -> str:
    if typing.get_origin(annotation) is Annotated:
        return _plural(typing.get_args(annotation)[0])
    if sections_of(annotation):
        return "sections"
    return {int: "whole numbers", float: "numbers", str: "texts"}.get(annotation, "values")


def either(words: list[str]) -> str:
    """`a, b or c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _text(default: Any) -> str:
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, BaseConfig):
        return f"type: {default.type}" if hasattr(default, "type") else "a section"
    return json.dumps(default, ensure_ascii=False)
