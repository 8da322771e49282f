"""The script that measures how much code one training step enters."""

import house
import pytest


def test_the_source_is_counted():
    rows = {row["what"]: row for row in house.distribution_counts()}
    assert 30_000 < rows["posttrain"]["lines"] < rows["all"]["lines"]
    assert house.import_circle() == []
    assert {"model.path", "credit.type", "evaluation.every"} <= house.recipe_keys()
    assert "environment.entry_point" not in house.recipe_keys(), "a key of a plug-in"
    commands = house.options_of_commands()
    assert "--dry-run" in commands["rl"]
    assert commands["runs clean"] == ["--yes"]
    assert not [name for name in commands if name.startswith("memory")]


@pytest.mark.parametrize(("stage", "most"), [("rl", 38), ("sft", 17), ("dpo", 18)])
def test_a_step_enters_few_files(stage, most):
    trace = house.traced_step(stage)
    assert {"training/trainer.py", "training/updater.py"} <= set(trace.files)
    assert len(trace.files) <= most
