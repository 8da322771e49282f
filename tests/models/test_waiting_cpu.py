"""Threads wait awake while processors are free, and sleep soon where other processes are busy."""

import json
import os
import subprocess
import sys
import threading

import pytest

from posttrain.models.cpu import waiting

PROGRAM = """
import json, os, resource, subprocess, sys, threading, time

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import torch
from posttrain.models.cpu import waiting

torch.set_num_threads(2)
a, b = torch.randn(128, 256), torch.randn(256, 256)


def sleeps():
    "How often threads of this process fall asleep in 100 products that an addition of one thread follows."
    began = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for _ in range(100):
        (a @ b)[0].add_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - began


crowd = waiting.Crowd()
sleeps()
awake, before = sleeps(), a @ b
crowd.gather()
crowded, equal = sleeps(), bool(torch.equal(a @ b, before)) and bool(crowd)
crowd.leave()
awake = max(awake, sleeps())

busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
try:
    waiting.wait_by_load()
    waiting.wait_by_load()
    until = time.monotonic() + 60
    while time.monotonic() < until and threading.active_count() == 2:
        sleeps()
finally:
    for one in busy:
        one.kill()
print(json.dumps([awake, crowded, equal and not crowd, threading.active_count() > 2]))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or len(waiting.usable_processors()) < 2,
    reason="needs two processors, and Linux, which counts how long threads wait for one",
)
def test_threads_sleep_in_a_crowd_which_busy_processes_gather_and_no_result_changes():
    unset = {key: value for key, value in os.environ.items() if key not in (*waiting.CHOSEN, "OMP_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=unset, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    awake, crowded, equal, noticed = json.loads(done.stdout)
    assert crowded > 33
    assert crowded > 3 * awake
    assert equal
    assert noticed


@pytest.mark.parametrize(
    ("threads", "variables", "watched"),
    [(2, {}, 1), (1, {}, 0), (2, {"GOMP_SPINCOUNT": "7"}, 0), (2, {"OMP_WAIT_POLICY": "active"}, 0)],
)
def test_one_thread_watches_unless_the_user_chose_or_one_thread_computes(
    threads, variables, watched, monkeypatch, tmp_path
):
    monkeypatch.setattr(waiting, "TASKS", tmp_path)
    for name in waiting.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(waiting.torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(waiting, "_started", threading.Event())
    called = threading.Semaphore(0)
    monkeypatch.setattr(waiting, "_watch", called.release)
    waiting.wait_by_load()
    waiting.wait_by_load()
    assert [called.acquire(timeout=10 * watched) for _ in range(watched)] == [True] * watched
    assert not called.acquire(blocking=False)


def test_waiting_counts_every_thread_and_passes_over_those_that_have_ended(tmp_path, monkeypatch):
    for name, line in {"1": "5 2000000000 3", "2": "9 500000000 1", "3": "", "4": None}.items():
        (tmp_path / name).mkdir()
        if line is not None:
            (tmp_path / name / "schedstat").write_text(line)
    monkeypatch.setattr(waiting, "TASKS", tmp_path)
    assert waiting.waiting() == 2.5
