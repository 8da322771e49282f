"""Themes are files with a strict schema, and an error names the key."""

import copy
import json

import pytest
from pydantic import ValidationError

from posttrain_memory.worlds.theme import FOLDER, read_theme, themes


def test_every_file_is_a_theme_with_the_name_of_its_file():
    assert len(themes()) == len(list(FOLDER.glob("*.yaml"))) == 15
    assert {name.replace(" ", "_") for name in themes()} == {file.stem for file in FOLDER.glob("*.yaml")}


@pytest.mark.parametrize(
    ("keys", "value", "place"),
    [
        (("colour",), "red", "colour"),
        (("kinds", 0, "facts", 1, "sentence"), "No placeholder.", r"kinds\.0\.facts\.1\.sentence"),
        (("kinds", 0, "facts", 0, "values"), "heavy", r"kinds\.0\.facts\.0[^.](.|\n)*number"),
        (("kinds", 0, "facts", 0, "values"), 7, r"kinds\.0\.facts\.0\.values"),
        (("kinds", 1, "key"), "pet", "kinds(.|\n)*key"),
        (("kinds", 0, "facts", 0, "label"), "food budget", "food budget.*types money and number"),
        (("kinds", 0, "facts", 0, "aliases"), ["temperament"], "temperament.*weight and temper"),
        (("relations", 0, "target"), "nobody", r"relations\.0: .*kinds"),
    ],
)
def test_a_wrong_key_is_named(keys, value, place):
    values = copy.deepcopy(themes()["pets"].model_dump(mode="json"))
    part = values
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    with pytest.raises(ValidationError, match=place):
        read_theme(json.dumps(values))  # JSON is YAML, too
