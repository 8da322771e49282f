"""Keys that have an effect only together with others: declared on their fields, checked by one function."""

from typing import Annotated, Literal

import pytest
from pydantic import ValidationError

from posttrain.errors import InputError
from posttrain.recipe.base import BaseConfig
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.needs import Needs, needs, unless, without_effect
from posttrain.recipe.reference import sections_of
from posttrain.recipe.stages import STAGES


class Inner(BaseConfig):
    kind: Literal["plain", "deep"] = "plain"
    depth: Annotated[int, needs("kind", "deep")] = 1
    scale: Annotated[float, needs("outer.on")] = 1.0
    limit: Annotated[int, unless("kind", "deep", refused=True)] = 1


class Switch(BaseConfig):
    on: bool = False


class Whole(BaseConfig):
    outer: Switch = Switch()
    inner: Annotated[Inner, unless("name", "without")] = Inner()
    name: str = "with"
    odd: Annotated[int, Needs(lambda find: find("odd") % 2 == 1, "it is even", "add 1")] = 1


def keys(recipe):
    return [sentence.split()[0] for sentence in without_effect(recipe)]


def test_a_key_needs_others_of_its_section_and_of_those_around_it():
    given = Whole(inner={"depth": 2, "scale": 2.0}, odd=4)
    assert sorted(keys(given)) == ["inner.depth", "inner.scale", "odd"]
    assert "remove it, or set inner.kind to deep" in next(iter(without_effect(Whole(inner={"depth": 2}))))
    assert keys(Whole(inner={"kind": "deep", "depth": 2, "scale": 2.0}, outer={"on": True}, odd=5)) == []
    # Defaults are not given, and keys of a section without effect are not named.
    assert keys(Whole(inner={"depth": 1})) == []
    assert keys(Whole.model_validate(Whole(name="without").model_dump())) == []
    assert keys(Whole(inner={"depth": 2}, name="without")) == ["inner"]


def test_a_refused_key_is_an_error_of_its_section():
    with pytest.raises(ValidationError, match="`limit` has no effect: kind is deep"):
        Whole(inner={"kind": "deep", "limit": 3})
    with pytest.raises(InputError, match=r"override critic\.path=a: critic: `path` has no effect"):
        load_recipe([], ["critic.backbone=shared", "critic.path=a"], "rl")


def test_every_declared_need_names_keys_that_exist():
    """A misspelled key would hold never, or always."""
    names = {name for stage in STAGES.values() for section in _all(stage) for name in _attributes(section)}
    for stage in STAGES.values():
        for section in _all(stage):
            for info in section.model_fields.values():
                for need in (mark for mark in info.metadata if isinstance(mark, Needs) and mark.key):
                    assert set(need.key.split(".")) <= names, need.key


def _attributes(section):
    properties = (name for name in dir(section) if isinstance(getattr(section, name), property))
    return {*section.model_fields, *section.__class_vars__, *properties}


def _all(part):
    found = [part]
    for section in found:
        inside = [inner for info in section.model_fields.values() for inner in sections_of(info.annotation)]
        found += [inner for inner in inside if inner not in found]
    return found
