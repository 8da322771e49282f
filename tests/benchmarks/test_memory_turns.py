"""The benchmark of the memory agent's turns runs and plays the turns it counts."""

import json

import pytest

from tests.benchmarks.conftest import output_of


@pytest.mark.slow
def test_the_table_of_turns(tmp_path):
    file = tmp_path / "table.json"
    output_of("memory_turns", *f"--rounds 1 --turns 8 --players 2 --json {file}".split())
    rows = json.loads(file.read_text())["rows"]
    assert [(row["vault"], row["workers"]) for row in rows] == [
        (vault, workers) for vault in ("memory", "disk", "disk, synced") for workers in (1, 2)
    ]
    for row in rows:
        assert row["turns/s"] > 0
        assert row["calls/turn"] == 2.25
        assert row["calls/s"] == pytest.approx(2.25 * row["turns/s"])
        assert 0 < row["median ms"] <= row["99% ms"]
