"""The table of what learns: its numbers, and that the page has those of the stored runs."""

import math
from pathlib import Path

import learning
import pytest

FOLDER = Path(__file__).parents[2]


def line(variant, seed, curve, final):
    points = [(5 * step, 2.0 * step, success) for step, success in enumerate(curve)]
    return {"environment": "bandit", "variant": variant, "seed": seed, "curve": points, "final": final} | {
        "random": 0.5,
        "optimal": 1.0,
    }


def test_the_page_has_the_tables_of_the_stored_runs():
    lines = learning.read_lines(FOLDER / "docs" / "results" / "learning.jsonl")
    page = (FOLDER / "docs" / "results" / "learning.md").read_text()
    assert [section for section in learning.sections(lines) if section not in page] == []
    settings = learning.read_lines(FOLDER / "docs" / "results" / "learning_settings.jsonl")
    assert learning.markdown(learning.table(settings)) in page


def test_the_area_is_compared_by_training_seed():
    """Each seed gains ten points over its own base, however far the seeds are apart, and whatever the order of the lines."""
    bases = [line("base", seed, [0.5, level], level) for seed, level in enumerate((0.2, 0.9, 0.5))]
    better = [line("credit grpo", seed, [0.5, level + 0.2], level) for seed, level in ((2, 0.5), (0, 0.2), (1, 0.9))]
    base, row = learning.table([*better, *bases])
    assert base["area - base"] == "–"
    assert row["area - base"] == "10.0%"
    unpaired = learning.table([*bases, line("credit grpo", 7, [0.5, 0.5], 0.5)])[1]
    assert unpaired["area - base"] == "–"


@pytest.mark.parametrize(
    ("times", "shown"),
    [([3.0, 1.0, 2.0], "2"), ([math.inf, 1.0, 2.0], "2 (2 of 3)"), ([math.inf, 1.0, math.inf], "– (1 of 3)")],
)
def test_a_run_that_never_gets_there_takes_longest(times, shown):
    assert learning._times(times) == shown
