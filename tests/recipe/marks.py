"""Every key of every recipe with its mark, and a way to set it: the tests of trust and the adversary walk them."""

import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple, Union

from pydantic import SerializeAsAny

from posttrain.recipe.base import EXECUTES, Mark
from posttrain.recipe.components import EnvironmentRecipe, environment_classes
from posttrain.recipe.pipeline import ConvertRecipe, PipelineRecipe
from posttrain.recipe.reference import load_plugins, sections_of, tags_of
from posttrain.recipe.stages import STAGES
from posttrain.recipe.study import StudyRecipe


class Leaf(NamedTuple):
    """`key`: dotted, with `[]` for items of lists and `*` for names; `wrap`: the values of a recipe that set the key."""

    key: str
    part: Any
    mark: Mark | None
    wrap: Callable[[Any], Any]


def leaves(part: Any, key: str, wrap: Callable[[Any], Any]) -> Iterator[Leaf]:
    """The keys of plain values in the annotation `part`."""
    origin, members = typing.get_origin(part), typing.get_args(part)
    mark = next((one for one in members[1:] if isinstance(one, Mark)), None) if origin is Annotated else None
    if mark is not None:
        yield Leaf(key, members[0], mark, wrap)
    elif origin in (Annotated, SerializeAsAny):
        yield from leaves(members[0], key, wrap)
    elif origin in (Union, types.UnionType):
        for member in members:
            yield from leaves(member, key, wrap)
    elif origin in (list, tuple):
        yield from leaves(members[0], f"{key}[]", lambda value: wrap([value]))
    elif origin is dict:
        yield from leaves(members[1], f"{key}.*", lambda value: wrap({"any": value}))
    elif part is EnvironmentRecipe:
        yield Leaf(f"{key}.type", str, EXECUTES, lambda value: wrap({"type": value}))
        for name, environment in environment_classes().items():
            yield from _of_section(environment.Recipe, key, wrap, {"type": name})
    elif sections := sections_of(part):
        for section in sections:
            tags = tags_of(section)
            yield from _of_section(section, key, wrap, {"type": tags[0]} if tags else {})
    else:
        yield Leaf(key, part, None, wrap)


def _of_section(section: Any, key: str, wrap: Callable[[Any], Any], tag: dict[str, str]) -> Iterator[Leaf]:
    for name, info in section.model_fields.items():
        if name == "type" and tag:
            continue
        part = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
        within = f"{key}.{name}" if key else name
        yield from leaves(part, within, lambda value, name=name: wrap({**tag, name: value}))


def marked_keys() -> dict[str, list[Leaf]]:
    """The keys of each stage, of pipelines and of studies."""
    load_plugins()
    schemas = {**STAGES, "convert": ConvertRecipe, "pipeline": PipelineRecipe, "tune": StudyRecipe}
    return {stage: list(_of_section(schema, "", lambda value: value, {})) for stage, schema in schemas.items()}


def table() -> str:
    """The rows of `SECURITY.md` about the keys that need trust."""
    keys: dict[str, set[str]] = {}
    for stage, found in marked_keys().items():
        for leaf in found if stage in STAGES else ():
            shared = leaf.key.removeprefix("evaluation.").removeprefix("off_policy.").removeprefix("ptx.")
            shared = shared.replace("audit.environment", "environment")
            if leaf.mark is not None and leaf.mark.needs_trust:
                keys.setdefault(leaf.mark.does, set()).add(shared)
    rows = [f"| {does} | {', '.join(f'`{key}`' for key in sorted(keys[does]))} |" for does in sorted(keys)]
    return "\n".join(["| mark | keys |", "|---|---|", *rows]) + "\n"
