"""The simulation of intervals: exact rows, and that what is drawn has the claimed coverage within its noise."""

import math
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2]
sys.path.insert(0, str(FOLDER / "benchmarks"))

import intervals  # noqa: E402

from posttrain.runs.intervals import Estimate  # noqa: E402


def test_counted_rows_are_exact():
    found = [intervals.measure(row, 0) for row in (*intervals.rates(), *intervals.means()) if row.counted]
    assert len(found) >= 36
    assert min(one.right for one in found) >= 0.95
    rare = next(one for one in found if one.row.data == "n = 64, 0 or 1, p = 0.01")
    assert rare.printed == pytest.approx(1 - 0.99**64 - 0.01**64)


@pytest.mark.parametrize(
    "data",
    ["n = 10, normal", "3 rows of 5 to 199 tokens", "30 rows of 5 to 199 tokens", "8 items, 0.6", "5 seeds, normal"],
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
    assert (intervals.measure(silent, 10).right, intervals.measure(silent, 10).printed) == (1, 0)


def test_the_page_has_every_row_and_none_without_a_reason():
    page = (FOLDER / "docs" / "results" / "intervals.md").read_text()
    assert "NOT AS CLAIMED" not in page
    for group in intervals.GROUPS.values():
        for row in group():
            assert f"| {row.number} | {row.data} |" in page
