"""The package on systems without `fcntl`, `resource`, `os.fork`, processor affinity and `/proc`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain import locks
from tests import elsewhere

ROOT = Path(__file__).parent.parent


def test_a_bandit_trains_on_a_system_without_what_only_posix_has(tiny_model, tmp_path):
    bandit = ["rl", "environment.type=bandit", f"model.path={tiny_model}", "steps=2", "rollout.groups_per_step=2"]
    bandit += ["evaluation.final_seeds.count=4", "evaluation.every=0", f"runs={tmp_path}", "name=b", "plots=false"]
    commands = [["--help"], [*bandit, "--dry-run"], bandit]
    run = subprocess.run(
        [sys.executable, "-m", "tests.elsewhere", json.dumps(commands)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr
    done = json.loads(run.stdout.splitlines()[-1])
    assert done["codes"] == [0, 0, 0], run.stderr
    assert done["modules"] > 350
    steps = [json.loads(line)["step"] for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 2


@pytest.mark.parametrize("windows", [False, True])
def test_a_lock_is_held_by_one_open_file(windows, tmp_path, monkeypatch):
    if windows:
        monkeypatch.setitem(sys.modules, "msvcrt", elsewhere._played_locks())
        monkeypatch.setattr(locks, "fcntl", None)
    (tmp_path / "file").write_text("12")
    with (tmp_path / "file").open("r+b") as first, (tmp_path / "file").open("r+b") as second:
        locks.lock(first.fileno())
        assert first.read() == b"12"
        with pytest.raises(BlockingIOError):
            locks.lock(second.fileno())
        locks.unlock(first.fileno())
        locks.lock(second.fileno(), wait=True)
        with pytest.raises(BlockingIOError):
            locks.lock(first.fileno())
