"""The numbers of the four documents (documents.yaml) against the recipes and their pages.

A recipe has the document's number, or its page says otherwise: where a recipe changes, adds or drops a number, a row of a
table of the page names it. The row of a changed or dropped number has the document's flag and number, and that of a changed one
our number too. The row of an added number has our key and number.
"""

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from posttrain.recipe.catalogue import recipe_file, recipe_names
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.sources import read_file
from posttrain.recipe.study import grid_of, load_study
from tests.docs.test_site import module

ROOT = Path(__file__).parents[2]
DOCUMENTS = yaml.safe_load((Path(__file__).parent / "documents.yaml").read_text(encoding="utf-8"))
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?![\w]|\.\d)")
PLACES = {"start"}
"""Last parts of keys whose numbers follow from how many others there are."""


@cache
def rows_of(page):
    """The rows of the tables of a page, as text, those that the importer makes included."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    text = module("theme/hooks.py").on_page_markdown(text, None, None, None)
    return [line for line in text.splitlines() if line.startswith("|") and not set(line) <= set("|- ")]


def numbers_in(row):
    return {float(found.replace(",", "")) for found in NUMBER.findall(row)}


def resolved(entry, changes):
    """The values of the recipe; of a study its own, and the list of values of each key that it searches."""
    files = list(entry["recipe"])
    if entry["stage"] != "tune":
        return load_recipe(files, list(changes), entry["stage"]).model_dump(mode="json")
    study = load_study(*files, list(changes))
    searched = {}
    for point in (point for group in study.recipe.groups for point in grid_of(group)):
        for key, value in study.keys_of(point).items():
            values = searched.setdefault(key, [])
            values += [value] if value not in values else []
    return study.recipe.model_dump(mode="json") | {"trials": study.recipe.number_of_trials} | searched


def value_at(values, key):
    """The value at a dotted key; None where a section or the key is missing."""
    if key in values:
        return values[key]
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def has_row(page, name, *numbers):
    """Whether a row of the page has `name`, quoted or in brackets, and all the numbers."""
    found = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])")
    return any(found.search(row) and {float(number) for number in numbers} <= numbers_in(row) for row in rows_of(page))


def has_key(page, key, number):
    """Whether a row of the page has `key`, whole or by its section (`kl.*`), and the number."""
    section = key.rpartition(".")[0]
    return has_row(page, key, number) or any(f"`{section}.*`" in row for row in rows_of(page))


def differences(entry, changes=()):
    """Sentences about the numbers that differ from the document and that no row of the page names."""
    recipe, page, missing = resolved(entry, changes), entry["page"], []
    for flag, number in entry["numbers"].items():
        ours = value_at(recipe, number["key"]) if "key" in number else None
        if ours == number.get("here", number["value"]):
            continue
        if not has_row(page, flag, *as_list(number["value"]), *as_list(ours)):
            what = "dropped" if ours is None else f"{number['key']} = {ours}"
            missing.append(f"{flag} {number['value']} ({what})")
    return missing


def as_list(value):
    return value if isinstance(value, list) else [] if value is None else [value]


def added(entry):
    """Sentences about the numbers of the last recipe file that are not in the document and that no row names."""
    known = {number["key"] for number in entry["numbers"].values() if "key" in number}
    missing = []
    for key, number in leaves(read_file(str(recipe_file(entry["recipe"][-1]))).values):
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if (
            is_number
            and key not in known
            and key.split(".")[-1] not in PLACES
            and not has_key(entry["page"], key, number)
        ):
            missing.append(f"{key} = {number}")
    return missing


def leaves(values, place=()):
    if not isinstance(values, dict):
        return [(".".join(place), values)]
    return [leaf for key, inner in values.items() for leaf in leaves(inner, (*place, key))]


@pytest.mark.parametrize("entry", DOCUMENTS, ids=lambda entry: "+".join(entry["recipe"]))
def test_a_number_that_differs_from_the_document_or_is_not_in_it_has_a_row_on_the_page(entry):
    assert differences(entry) == []
    assert added(entry) == []


@pytest.mark.parametrize(
    ("recipe", "change", "expected"),
    [
        ("helpsteer3/reward", "model.lora.rank=17", "--lora_r 16 (model.lora.rank = 17)"),
        ("rlhf/ppo", "kl.coefficient=0.02", "--init_kl_coef 0.01 (kl.coefficient = 0.02)"),
        ("ragen/sokoban", "environment.max_turns=6", "training.max_turns 5 (environment.max_turns = 6)"),
        ("memory/gspo_published", "kl.horizon=255", "--kl_horizon 256 (kl.horizon = 255.0)"),
    ],
)
def test_a_changed_recipe_is_detected(recipe, change, expected):
    entry = next(entry for entry in DOCUMENTS if entry["recipe"] == [recipe])
    assert differences(entry, [change]) == [expected]


def test_every_document_and_every_recipe_of_its_folder_is_compared():
    compared = {name for entry in DOCUMENTS for name in entry["recipe"]}
    # Placements, studies, tables and chains of other recipes of the folder; the document fine-tunes no bandit.
    others = re.compile(r"_8gpu|tune_|scaling|board|pipeline|bandit_sft|evaluate")
    for folder in ("helpsteer3", "memory", "ragen", "rlhf"):
        names = {name for name in recipe_names() if name.startswith(f"{folder}/")}
        assert {name for name in names if not others.search(name)} <= compared
