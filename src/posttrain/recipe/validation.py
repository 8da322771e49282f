"""Validation errors of a recipe, one sentence each: the origin, the key, the value, and what is allowed."""

import difflib
import json
import re
import typing
from contextlib import suppress
from functools import cache
from importlib import resources
from itertools import chain
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from posttrain.errors import InputError
from posttrain.recipe.base import BaseConfig
from posttrain.recipe.components import EnvironmentRecipe, environment_class, environment_classes
from posttrain.recipe.reference import allowed, either, keys_of, sections_of, tags_of
from posttrain.recipe.sources import KeyPath, Layer
from posttrain.recipe.stages import STAGES


def validation_errors(error: ValidationError, schema: type[BaseConfig], given: Layer) -> list[str]:
    """Sentences for the problems that pydantic found in the recipe `given` of `schema`. Several errors of one key become
    one sentence."""
    found: dict[KeyPath, ErrorDetails] = {}
    # Of the forms that a value may have, the problem deepest inside of it shows which one is meant.
    for problem in error.errors(include_url=False):
        path = _key_path(problem, given.values)
        if path not in found or len(problem["loc"]) > len(found[path]["loc"]):
            found[path] = problem
    around = {path[:end] for path in found for end in range(len(path))}
    sentences: list[str] = []
    # A missing key may be one that is misspelt.
    for path, problem in sorted(found.items(), key=lambda one: one[1]["type"] == "missing"):
        misspelt = problem["type"] == "missing" and f"the nearest is {'.'.join(path)}"
        if path not in around and not (misspelt and any(one.endswith(misspelt) for one in sentences)):
            sentences.append(_sentence(problem, path, schema, given))
    return sentences


@cache
def foreign_keys() -> dict[str, dict[str, Any]]:
    """Names of keys in TRL, transformers, OpenRLHF and verl, from the rules of `posttrain import`.

    `keys`: name -> the keys here. `reasons`: name -> why there is none. `units`: key here -> its unit.
    """
    return json.loads((resources.files("posttrain.recipe") / "foreign.json").read_text(encoding="utf-8"))


def nearest_type(name: str, choices: list[str]) -> str:
    """A hint with the choice most similar to `name`; empty if there is none."""
    by_case = {choice.casefold(): choice for choice in choices}
    near = difflib.get_close_matches(name.casefold(), by_case, 1, 0.6)
    return f" (did you mean {by_case[near[0]]}?)" if near else ""


def _sentence(problem: ErrorDetails, path: KeyPath, schema: type[BaseConfig], given: Layer) -> str:
    kind = problem["type"]
    while kind == "extra_forbidden" and (inside := _value(given.values, path)) and isinstance(inside, dict):
        # In a section that does not exist, the first key with a value.
        path = (*path, str(next(iter(inside))))
    place, dotted, value = given.origin(path), ".".join(path), _value(given.values, path)
    start = f"{place}: " if place else ""
    choices = re.findall("'([^']*)'", problem.get("ctx", {}).get("expected", ""))
    if problem["loc"][-1:] == ("[key]",):  # of a section whose keys are given, such as thresholds
        section = ".".join(path[:-1])
        return f"{start}there is no key {dotted}{nearest_type(path[-1], choices)}; the keys of {section} are {either(choices)}"
    if kind == "extra_forbidden":
        return f"{start}there is no key {dotted}; {_remedy(path, schema, given)}"
    if kind == "environment":
        where = given.origin((*path, "type"))
        return f"{where}: {problem['msg']}" if where else problem["msg"]
    if kind in ("value_error", "assertion_error"):
        message = str(problem["ctx"]["error"])
        if path:
            return f"{start}{dotted}: {message}"
        keys = [tuple(key.split(".")) for key in re.findall(r"`([a-z_.]+)", message)]
        place = next((given.origins[key] for key in reversed(keys) if key in given.origins), None)
        return f"{place}: {message}" if place else message
    if kind == "union_tag_invalid":
        types = [tag.strip(" '") for tag in problem["ctx"]["expected_tags"].split(",")]
        tag, where = _value(given.values, (*path, "type")), given.origin((*path, "type"))
        hint = nearest_type(str(tag), types)
        for stage, part in {"": schema, **STAGES}.items():
            tags = {key: chain(*map(tags_of, sections_of(info.annotation))) for key, info in part.model_fields.items()}
            if name := next((key for key, of_key in tags.items() if tag in of_key), ""):
                how = f" in stage {stage}: run `posttrain {stage} " if stage else ": write `"
                hint = f" (a type of {name}{how}{name}.type={tag}`)"
                break
        return f"{where}: {dotted}.type is {_show(tag)}{hint}; it must be {either(types)}"
    info, sections = _at(path, schema, given.values)
    words = problem["msg"] if info is None else allowed(info)
    if info is not None and typing.get_origin(info.annotation) is dict:  # its key is the user's, such as a threshold
        words, sections = problem["msg"].removeprefix("Input should be "), []
    sections = [] if info is not None and _listed(info.annotation) else sections
    fields = sections[0].model_fields if sections else {}
    if kind == "missing":
        if len(sections) != 1:
            return f"{start}{dotted} is missing; it must be {words}"
        required = " and ".join(f"{dotted}.{name}" for name, field in fields.items() if field.is_required())
        return f"{start}{dotted} is missing; set {required or either([f'{dotted}.{name}' for name in fields][:3])}"
    if kind in ("model_type", "model_attributes_type") and sections:
        words = f"a section with keys such as {', '.join(list(fields)[:4])}"
        mains = (str, ("type", "path", "train")), (int | float, ("coefficient", "rank"))
        main = next((key for of, keys in mains if isinstance(value, of) for key in keys if key in fields), None)
        if main is not None:
            words += f"; write {dotted}.{main}={value if isinstance(value, str) else _show(value)}"
    if kind in ("too_short", "too_long"):
        words = f"{words}, {problem['msg'].removeprefix('List should have ').partition(' after')[0]}"
    if words.startswith("text") and isinstance(value, int | float) and not isinstance(value, bool):
        words = f"{words}, in quotes"
    hint = ""
    if kind == "literal_error" and isinstance(value, str):
        hint = nearest_type({"gpu": "cuda", "mps": "cpu"}.get(value.casefold(), value), choices)
    return f"{start}{dotted} is {_show(value)}{hint}; it must be {words}"


def _remedy(path: KeyPath, schema: type[BaseConfig], given: Layer) -> str:
    """What to do about the key at `path`, which does not exist."""
    section, name, dotted = path[:-1], path[-1], ".".join(path)
    field, around = _at(section, schema, given.values)
    if other := _other_types(name, field):
        kind = _value(given.values, (*section, "type"))
        return f"it belongs to {'.'.join(section)}.type {', '.join(other)}, not {kind}, so remove it or change the type"
    known = foreign_keys()
    parts = dotted.replace("-", "_").split(".")
    # The longest end of a key of another framework counts.
    foreign = [end for at in range(len(parts)) if (end := ".".join(parts[at:])) in {*known["keys"], *known["reasons"]}]
    inner = list(dict.fromkeys(key for one in around for key in one.model_fields))
    # Listing the keys of all environments imports them, so that misspelt names come first.
    way: KeyPath = ()
    for step in path:
        inside = {key: None for one in _at(way, schema, given.values)[1] for key in one.model_fields}
        way = (*way, *difflib.get_close_matches(step, inside, 1, 0.75))
    if len(way) == len(path) and (not foreign or way[-1] == name):
        return f"the nearest is {'.'.join(way)}"
    names = [key.path for key in keys_of(schema, environments=not section or not around or "environment" in inner)]
    if around and issubclass(around[0], EnvironmentRecipe):
        names += [key.path for key in keys_of(around[0], f"{'.'.join(section)}.")]
    for key in sorted(names, key=len) if section else ():
        *sections, last = key.removeprefix(f"{'.'.join(section)}.").split(".")
        if last == name and sections and sections[0] in inner:  # a section of this one, or of its kind
            return f"the nearest is {'.'.join((*section, *sections, last))}"
    known_section = not section or any(key.startswith(f"{'.'.join(section)}.") for key in names)
    if not (section and known_section and any(key.split(".")[-1] == name for key in names)):
        for end in foreign:
            native = next((key for key in known["keys"].get(end, ()) if key in names), None)
            if native is not None:
                unit = known["units"].get(native)
                return f"use {native} ({unit})" if unit else f"use {native}"
            if end in known["reasons"]:
                return f"it has no counterpart: {known['reasons'][end]}"
    depth = len(section)
    siblings = sorted(
        {
            key.split(".")[depth]
            for key in names
            if key.count(".") >= depth
            and all(one in (wanted, "*") for wanted, one in zip(section, key.split("."), strict=False))
        }
    )
    if close := difflib.get_close_matches(name, siblings, 1, 0.75):
        return f"the nearest is {'.'.join((*section, close[0]))}"
    if not known_section and (close := difflib.get_close_matches(dotted, names, 1, 0.85)):
        return f"the nearest is {close[0]}"
    if elsewhere := sorted({key for key in names if key.split(".")[-1] == name}):
        return f"{' and '.join(elsewhere)} {'has' if len(elsewhere) == 1 else 'have'} that name"
    is_stage = "stage" in schema.model_fields
    stages = [name for name, other in STAGES.items() if path[0] in other.model_fields]
    if is_stage and stages and path[0] not in schema.model_fields:
        if holder := {"keys", "common"} & schema.model_fields.keys():  # a study, a pipeline
            return f"write {holder.pop()}.{dotted}"
        return f"{path[0]} belongs to stage {', '.join(stages)}, not {schema.model_fields['stage'].default}"
    # Of keys with one name, the one in the fewest sections: optimizer.learning_rate, not that of the critic.
    leaves = {key.split(".")[-1]: key for key in sorted(names, key=lambda key: (key.count("."), key), reverse=True)}
    if close := difflib.get_close_matches(name, leaves, 1, 0.75):
        return f"the nearest is {leaves[close[0]]}"
    if siblings and (section or not is_stage):
        about = f" of {'.'.join(section)}" if section else ""
        return f"the keys{about} are {', '.join(siblings)}"
    shown = f" --stage {schema.model_fields['stage'].default}" if is_stage else ""
    return f"`posttrain recipe{shown}` shows the keys, and `posttrain import` converts commands of TRL, OpenRLHF, verl and RAGEN"


def _other_types(name: str, field: Any) -> list[str]:
    """Types of the section in `field` that have the key `name`."""
    sections = [] if field is None else sections_of(field.annotation)
    if EnvironmentRecipe in sections:
        return [kind for kind, one in environment_classes().items() if name in one.Recipe.model_fields]
    having = [section for section in sections if len(sections) > 1 and name in section.model_fields]
    return [tag for section in having for tag in tags_of(section)]


def _at(path: KeyPath, part: type[BaseConfig], values: Any) -> tuple[Any, list[type[BaseConfig]]]:
    """The field that `path` names, in the sections that the `type` keys of `values` select, and the sections that it may
    have. None if there is no such field; for an empty path, the section is `part`."""
    sections: list[type[BaseConfig]] = [part]
    info = None
    names = iter(path)
    for name in names:
        kind = values.get("type") if isinstance(values, dict) else None
        chosen = [section for section in sections if len(sections) == 1 or kind in tags_of(section)] or sections
        info = next((section.model_fields[name] for section in chosen if name in section.model_fields), None)
        if info is None:
            return None, []
        sections = sections_of(info.annotation) or _listed(info.annotation)
        values = values.get(name) if isinstance(values, dict) else None
        if typing.get_origin(info.annotation) is dict:
            # The user chose the next name.
            sections = sections_of(typing.get_args(info.annotation)[1])
            values = values.get(next(names, "")) if isinstance(values, dict) else None
        if EnvironmentRecipe in sections and isinstance(values, dict):
            with suppress(InputError):
                sections = [environment_class(str(values.get("type"))).Recipe]
    return info, sections


def _listed(annotation: Any) -> list[type[BaseConfig]]:
    """The sections of a list of sections, which may be one of several types."""
    inside = typing.get_args(annotation)
    if typing.get_origin(annotation) is list:
        return sections_of(inside[0])
    return [section for part in inside for section in _listed(part)]


def _key_path(problem: ErrorDetails, values: Any) -> KeyPath:
    """pydantic's location without the tags of unions and without list indices."""
    path: list[str] = []
    for at, step in enumerate(problem["loc"]):
        if isinstance(values, list) and isinstance(step, int) and step < len(values):
            values = values[step]
        elif isinstance(values, dict) and step in values:
            path.append(str(step))
            values = values[step]
        elif problem["type"] == "missing" and isinstance(values, dict) and at == len(problem["loc"]) - 1:
            path.append(str(step))
        elif not isinstance(values, dict | list):
            break
    return tuple(path)


def _value(values: Any, path: KeyPath) -> Any:
    for key in path:
        if isinstance(values, list):  # several sections: the first with the key
            values = next((one for one in values if isinstance(one, dict) and key in one), None)
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
