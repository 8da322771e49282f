"""`benchmarks/contention.py` runs both parts beside a busy process by the public interface."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "contention.py"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_training_and_sampling_beside_a_busy_process(tmp_path):
    file = tmp_path / "table.json"
    command = [sys.executable, str(SCRIPT), "--seconds", "1", "--rounds", "1", "--busy", "0,1", "--json", str(file)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 12
    for row in rows:
        assert row["tokens/s"] > 0
        assert row["fair share"] == pytest.approx(1 / (1 + row["busy"] / len(os.sched_getaffinity(0))))
        if row["busy"] == 0:
            assert row["of the quiet speed"] == 1
