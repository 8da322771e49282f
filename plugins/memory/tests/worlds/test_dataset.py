"""Rows of tasks: apart by world, unique by question, read back whole."""

import json

import pytest

from posttrain.errors import InputError
from posttrain_memory.worlds.generation import SPLITS, question_key, read_row, row_of, samples
from posttrain_memory.worlds.recipe import WorldRecipe

COUNTS = {"train": 12, "dev": 4, "test": 4}
RECIPE = WorldRecipe(notes=8)


def test_splits_share_no_world_and_no_question():
    made = list(samples(0, RECIPE, COUNTS))
    worlds = {split: {one.world.seed for one in made if one.split == split} for split in SPLITS}
    titles = {split: {one.world.graph.title for one in made if one.split == split} for split in SPLITS}
    assert {split: len(seeds) for split, seeds in worlds.items()} == COUNTS
    assert len(set.union(*worlds.values())) == len(set.union(*titles.values())) == sum(COUNTS.values())
    assert len({question_key(one.task) for one in made}) == len(made)


def test_more_training_leaves_the_test_as_it_is():
    few = [row_of(one) for one in samples(0, RECIPE, {"test": 3, "dev": 1, "train": 1})]
    many = [row_of(one) for one in samples(0, RECIPE, {"test": 3, "dev": 1, "train": 5})]
    assert many[: len(few)] == few
    assert [row_of(one) for one in samples(1, RECIPE, {"test": 3})] != few


def test_rows_are_json_and_read_back():
    for one in samples(3, RECIPE, {"test": 3}):
        row = json.loads(json.dumps(row_of(one)))
        assert row["context_messages"] == [{"role": "user", "content": one.task.question}]
        task, files = read_row(row)
        assert (task, files) == (one.task, one.world.files)
        assert read_row({"label": row["label"]}) == (task, files)
    for label in ("x", "{}", '{"task": {}}'):
        with pytest.raises(InputError):
            read_row({"label": label})
