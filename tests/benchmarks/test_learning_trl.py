"""The page has the numbers of the stored runs beside TRL."""

from pathlib import Path

import learning_trl

FOLDER = Path(__file__).parents[2]


def test_the_page_has_the_numbers_of_the_stored_runs():
    lines = learning_trl.read_lines(FOLDER / "docs" / "results" / "learning_trl.jsonl")
    page = (FOLDER / "docs" / "results" / "learning.md").read_text()
    rows = learning_trl.table(lines)
    assert {row["seeds"] for row in rows} == {5}
    for row in rows:
        shown = (row["task"], row["side"].replace("trl", "TRL"), row["learning rate"], row["final success"])
        assert f"| {' | '.join(shown)} | {row['success of all samples']:.1%} |" in page
    for row in learning_trl.differences(lines):
        assert f"| {row['task']} | {row['success of all samples']} | {row['final success']} |" in page
