"""Themes are files with a strict schema, and an error names the file and the key."""

import copy
import json
import re

import pytest

from posttrain.errors import InputError
from posttrain_memory.worlds.theme import FOLDER, read_theme, themes

PETS = read_theme(FOLDER / "pets.yaml").model_dump(mode="json")


def test_every_file_is_a_theme_with_the_name_of_its_file():
    assert len(themes()) == len(list(FOLDER.glob("*.yaml"))) == 15
    assert {name.replace(" ", "_") for name in themes()} == {file.stem for file in FOLDER.glob("*.yaml")}


def changed(keys, value):
    """The pets with the value at `keys` replaced, or removed where `value` is None."""
    values = copy.deepcopy(PETS)
    part = values
    for key in keys[:-1]:
        part = part[key]
    if value is None:
        del part[keys[-1]]
    else:
        part[keys[-1]] = value
    return values


@pytest.mark.parametrize(
    ("keys", "value", "place"),
    [
        (("titles",), None, "titles"),
        (("colour",), "red", "colour"),
        (("filler",), "one", "filler"),
        (("styles", 0), "verse", r"styles\.0"),
        (("headings", "other"), [], r"headings\.other"),
        (("kinds", 0, "facts", 1, "sentence"), "No placeholder.", r"kinds\.0\.facts\.1\.sentence"),
        (("kinds", 0, "facts", 0, "values"), "heavy", r"kinds\.0\.facts\.0: .*number"),
        (("kinds", 0, "facts", 0, "values"), 7, r"kinds\.0\.facts\.0\.values"),
        (("kinds", 0, "facts", 0, "type"), "weight", r"kinds\.0\.facts\.0\.type"),
        (("kinds", 0, "about"), "animal", r"kinds\.0\.about"),
        (("kinds", 1, "key"), "pet", "kinds: .*key"),
        (("kinds", 0, "facts", 0, "label"), "food budget", "food budget.*types money and number"),
        (("kinds", 0, "facts", 0, "aliases"), ["temperament"], "temperament.*weight and temper"),
        (("relations", 0, "target"), "nobody", r"relations\.0: .*kinds"),
        (("relations", 0, "many"), "yes", r"relations\.0\.many"),
        (("kinds", 0, "names"), [{"a": 1}], r"kinds\.0\.names\.0"),
    ],
)
def test_an_error_is_one_line_with_the_file_and_the_key(tmp_path, keys, value, place):
    file = tmp_path / "wrong.yaml"
    # JSON is YAML, too.
    file.write_text(json.dumps(changed(keys, value)))
    with pytest.raises(InputError, match=rf"wrong\.yaml: {place}|wrong\.yaml: .*{place}") as raised:
        read_theme(file)
    assert "\n" not in str(raised.value)


def test_invalid_yaml_is_named_too(tmp_path):
    file = tmp_path / "wrong.yaml"
    for text in ("titles: [", "- a\n- b\n", "name: 2024-05-01\n", "\0"):
        file.write_text(text)
        with pytest.raises(InputError, match=re.escape(str(file))) as raised:
            read_theme(file)
        assert "\n" not in str(raised.value)
