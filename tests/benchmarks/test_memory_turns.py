"""The benchmark of the memory agent's turns runs and plays the turns it counts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_the_table_of_turns(tmp_path):
    file = tmp_path / "table.json"
    options = f"--rounds 1 --turns 8 --players 2 --json {file}"
    command = [sys.executable, str(FOLDER / "memory_turns.py"), *options.split()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(file.read_text())["rows"]
    assert [(row["vault"], row["workers"]) for row in rows] == [
        (vault, workers) for vault in ("memory", "disk", "disk, synced") for workers in (1, 2)
    ]
    for row in rows:
        assert row["turns/s"] > 0
        assert row["calls/turn"] == 2.25
        assert row["calls/s"] == pytest.approx(2.25 * row["turns/s"])
        assert 0 < row["median ms"] <= row["99% ms"]
