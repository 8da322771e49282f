"""`benchmarks/contention.py` runs both parts beside a busy process by the public interface."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "contention.py"


@pytest.fixture
def contention(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("contention")


def test_the_quiet_speed_is_always_measured(contention, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["contention", "--busy", "1,3,1"])
    assert contention.options().busy == [0, 1, 3]
    monkeypatch.setattr(sys, "argv", ["contention", "--busy", "x"])
    with pytest.raises(SystemExit, match="2"):
        contention.options()
    assert "--busy: 'x' is not a whole number of 0 or more" in capsys.readouterr().err


def test_a_side_over_the_limit_has_no_row(contention, monkeypatch):
    outcome = {"tokens/s": 50.0, "per processor second": 40.0, "threads": 1}
    sides = [("sft", waiting, count) for count in (0, 1) for waiting in ("before", "after")]
    found = {"sft before 0": [outcome], "sft after 0": [outcome], "sft after 1": [outcome | {"tokens/s": 25.0}]}
    rows = contention.table(sides, found)
    assert [(row["waiting"], row["busy"]) for row in rows] == [("before", 0), ("after", 0), ("after", 1)]
    assert rows[-1]["of the quiet speed"] == 0.5
    monkeypatch.setattr(sys, "argv", ["contention", "--limit", "9"])
    assert contention.notes(contention.options(), 0.0, ["sft before 1"])[0] == (
        "left out, because a round took more than 9 s (--limit): sft before 1"
    )


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
