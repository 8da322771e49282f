"""`benchmarks/contention.py` runs both parts beside a busy process by the public interface."""

import json
import os

import pytest

from tests.benchmarks.conftest import output_of


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_training_and_sampling_beside_a_busy_process(tmp_path):
    file = tmp_path / "table.json"
    output_of("contention", "--seconds", "1", "--rounds", "1", "--busy", "0,1", "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 12
    for row in rows:
        assert row["tokens/s"] > 0
        assert row["fair share"] == pytest.approx(1 / (1 + row["busy"] / len(os.sched_getaffinity(0))))
        if row["busy"] == 0:
            assert row["of the quiet speed"] == 1
