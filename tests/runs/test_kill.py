"""SIGKILL at random moments: every file with its final name is complete."""

import subprocess
import sys
import time
from pathlib import Path

from posttrain.rollout.store import read_episodes, stored_steps
from posttrain.runs.metrics import MetricsLog, read_metrics

WRITER = """
import itertools, sys
from pathlib import Path
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory, write_atomically
from posttrain.runs.metrics import MetricsLog
from tests.rollout.episodes import played

run = RunDirectory(Path(sys.argv[1]))
episodes = [played(seed, (0.0, 1.0), tokens=40) for seed in range(20)]
with run.lock(), MetricsLog(run, []) as log:
    log.truncate_after(int(sys.argv[2]))
    print("going", flush=True)
    for step in itertools.count(int(sys.argv[2]) + 1):
        write_episodes(run.episodes, step, "train", episodes)
        write_atomically(run.checkpoints / "state", bytes([step % 256]) * 300_000)
        log.write(step, "train", {"values": [0.5] * 200})
"""


def test_files_of_a_killed_run_are_valid_and_it_resumes(run):
    last = 0
    for wait in (0.05, 0.11, 0.173):
        command = [sys.executable, "-c", WRITER, str(run.path), str(last)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as writer:
            assert writer.stdout.readline() == "going\n"
            while len(read_metrics(run.metrics)) <= last:
                time.sleep(0.01)
            time.sleep(wait)
            writer.kill()
        steps = [line["step"] for line in read_metrics(run.metrics)]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) > last
        stored = list(stored_steps(run.episodes))
        assert len(stored) >= len(steps)
        for file in stored:
            assert len(read_episodes(file.path).episodes) == 20
        state = (run.checkpoints / "state").read_bytes()
        assert len(state) == 300_000
        assert len(set(state)) == 1
        last = len(steps) // 2
    with run.lock(), MetricsLog(run, []) as log:
        log.write(last, "train", {})
    assert not list(run.path.rglob(".*.partial"))
