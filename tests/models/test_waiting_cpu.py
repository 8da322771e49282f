"""Threads wait awake while processors are free, and sleep soon where other processes are busy."""

import json
import os
import subprocess
import sys

import pytest

from posttrain.models.cpu import waiting

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux counts how long threads wait for a processor")
PROGRAM = """
import json, os, resource, subprocess, sys, threading, time
import torch
from posttrain.models.cpu import waiting

torch.set_num_threads(len(waiting.usable_processors()))
a, b = torch.randn(128, 256), torch.randn(256, 256)


def sleeps():
    "How often threads of this process fall asleep in 300 products that an addition of one thread follows."
    began = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for _ in range(300):
        (a @ b)[0].add_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - began


def names():
    return [thread.name for thread in threading.enumerate()]


"""


def run(code, **variables):
    environment = {key: value for key, value in os.environ.items() if key not in (*waiting.CHOSEN, "OMP_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + code], env=environment | variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@linux
@pytest.mark.skipif(len(waiting.usable_processors()) < 2, reason="one processor")
def test_a_crowd_lets_threads_sleep_and_changes_no_result():
    awake, crowded, again, equal = run("""
crowd = waiting.Crowd()
sleeps()
awake, before = sleeps(), a @ b
crowd.gather()
crowded, equal = sleeps(), bool(torch.equal(a @ b, before)) and bool(crowd)
crowd.leave()
print(json.dumps([awake, crowded, sleeps(), equal and not crowd]))
""")
    assert equal
    assert crowded > 100
    assert crowded > 3 * max(awake, again)


@linux
@pytest.mark.skipif(len(waiting.usable_processors()) < 2, reason="one processor")
def test_busy_processes_are_noticed_within_seconds():
    assert run("""
busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * torch.get_num_threads())]
waiting.wait_by_load()
waiting.wait_by_load()
until = time.monotonic() + 60
while time.monotonic() < until and len(names()) == 2:
    sleeps()
for one in busy:
    one.kill()
print(json.dumps(names().count("waiting") == 1 and len(names()) > 2))
""")


@linux
@pytest.mark.parametrize("chosen", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}, {"OMP_NUM_THREADS": "1"}])
def test_nothing_watches_where_the_user_chose_or_one_thread_computes(chosen):
    threads = "" if "OMP_NUM_THREADS" not in chosen else "torch.set_num_threads(1)\n"
    assert run(f"{threads}waiting.wait_by_load()\nprint(json.dumps(names() == ['MainThread']))", **chosen)


@linux
def test_waiting_counts_every_thread_and_passes_over_those_that_have_ended(tmp_path, monkeypatch):
    for name, line in {"1": "5 2000000000 3", "2": "9 500000000 1", "3": "", "4": None}.items():
        (tmp_path / name).mkdir()
        if line is not None:
            (tmp_path / name / "schedstat").write_text(line)
    monkeypatch.setattr(waiting, "TASKS", tmp_path)
    assert waiting.waiting() == 2.5
