"""Rows remember with which settings of an environment they were made."""

import json

import pytest

from posttrain.data.files import write_rows
from posttrain.recipe.components import environment_recipe
from posttrain.recipe.data import SourceRecipe
from posttrain.training.experts import SETTINGS_COLUMN, settings_text, settings_warnings


def lake(**keys):
    return environment_recipe({"type": "frozen_lake", **keys})


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_settings_that_differ_are_named(tmp_path, suffix):
    file = tmp_path / f"rows{suffix}"
    write_rows(file, [{"messages": [], SETTINGS_COLUMN: settings_text(lake(format={"thinking": True}))}] * 3)
    sources = [SourceRecipe(path=str(file))]
    assert settings_warnings(lake(format={"thinking": True}), sources) == []
    assert settings_warnings(lake(), sources) == [
        f"the rows of {file} were generated with environment.format.thinking true (here false), so training and evaluation "
        "differ; generate the rows again, or set these keys"
    ]
    many = lake(slippery=False, size=5, max_turns=7, format={"separator": "##"})
    (warning,) = settings_warnings(many, sources)
    assert warning.count("(here ") == 3
    assert " and 2 more, so" in warning
    assert settings_warnings(environment_recipe({"type": "bandit"}), sources) == []


@pytest.mark.parametrize("cell", [None, 3, "no JSON", "[1]", json.dumps({"type": "frozen_lake", "gone": 1})])
def test_rows_that_say_nothing_are_taken_as_they_are(tmp_path, cell):
    file = tmp_path / "rows.jsonl"
    file.write_text("broken\n" + json.dumps({"messages": [], SETTINGS_COLUMN: cell}) + "\n")
    assert settings_warnings(lake(), [SourceRecipe(path=str(file)), SourceRecipe(path="some/hub-id")]) == []
