"""The simulation of intervals: exact rows, and that what is drawn has the claimed coverage within its noise."""

import math
from pathlib import Path

import intervals
import pytest

from posttrain.runs.intervals import Estimate

FOLDER = Path(__file__).parents[2]


def test_counted_rows_are_exact():
    found = [intervals.measure(row, 0) for row in intervals.rates() if row.counted]
    assert len(found) >= 22
    assert min(one.right for one in found) >= 0.95


def test_coverage_is_that_of_the_printed_intervals():
    half = intervals.Row(
        "mean", "half", 0.0, lambda draws: Estimate(0.0, 1.0 if draws.random() < 0.5 else math.nan, 2.0, 3)
    )
    found = intervals.measure(half, 400)
    assert found.right == 0
    assert 0.4 < found.printed < 0.6


@pytest.mark.parametrize(
    "data",
    [
        "n = 10, normal",
        "10 rows of 5 to 199 tokens",
        "30 rows of 5 to 199 tokens",
        "8 items, 0.6",
        "5 seeds, normal, 70% ± 5",
    ],
)
def test_drawn_rows_cover(data):
    rows = [*intervals.differences(), *intervals.metrics(), *intervals.seeds()]
    for row in [row for row in rows if row.data == data and row.share == 1]:
        found = intervals.measure(row, 300)
        assert 0.91 <= found.right <= 0.99, row.number
        assert found == intervals.measure(row, 300)


def test_a_row_that_does_not_cover_has_a_note():
    never = intervals.Row("mean", "wrong", 2.0, lambda draws: Estimate(0.0, -1.0, 1.0, 3))
    assert intervals.measure(never, 10).note == "NOT AS CLAIMED"
    silent = intervals.Row("mean", "none", 2.0, lambda draws: Estimate(0.0, math.nan, math.nan, 1))
    assert (intervals.measure(silent, 10).printed, intervals.measure(silent, 10).note) == (0, "")


def test_the_page_has_every_row_and_none_without_a_reason():
    page = (FOLDER / "docs" / "results" / "intervals.md").read_text()
    assert "NOT AS CLAIMED" not in page
    below = set()
    for group in intervals.GROUPS.values():
        for row in group():
            assert f"| {row.number} | {row.data} |" in page
    for line in page.splitlines():
        cells = line.split(" | ")
        if len(cells) == 5 and cells[2].replace(".", "").isdigit() and float(cells[2]) < 92.5:
            below.add(cells[4].strip(" |"))
    assert below <= {intervals.UNSEEN}
