"""The number of threads beside other busy processes, and how threads wait."""

import os
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from posttrain.models.cpu import threads
from posttrain.recipe.rl import RlRecipe
from posttrain.runs.directory import RunDirectory
from posttrain.training.stage import with_threads

SPIN = "import os, posttrain; print(os.environ.get('GOMP_SPINCOUNT'))"


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_threads_that_wait_soon_sleep_unless_the_user_chose_otherwise(given, expected):
    variables = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")} | given
    printed = subprocess.run([sys.executable, "-c", SPIN], env=variables, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == expected


def test_other_busy_processes_are_counted(monkeypatch, tmp_path):
    file = tmp_path / "loadavg"
    file.write_text("0.20 0.18 0.12 4/80 11206\n")
    monkeypatch.setattr(threads, "RUNNING", file)
    monkeypatch.setattr(threads, "INTERVAL", 0.0)
    assert threads.busy_processors() == 3
    file.unlink()
    assert threads.busy_processors() == 0


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_fewer_threads_are_used_only_where_processors_are_busy_and_fewer_are_faster(two_threads, monkeypatch):
    asked = []
    monkeypatch.setattr(threads, "faster", lambda fewer, every: asked.append((fewer, every)) or True)
    assert threads.threads_beside(0.0) is None
    assert threads.threads_beside(1.0) == 1
    assert threads.threads_beside(5.0) == 1
    assert asked == [(1, 2), (1, 2)]
    assert torch.get_num_threads() == 2
    monkeypatch.setattr(threads, "faster", lambda fewer, every: False)
    assert threads.threads_beside(5.0) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads.threads_beside(5.0) is None
    assert len(asked) == 2


def test_a_process_with_some_of_the_processors_compares_if_any_other_thread_is_busy(two_threads, monkeypatch):
    asked = []
    monkeypatch.setattr(threads, "faster", lambda fewer, every: asked.append((fewer, every)) or True)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert len(threads.usable_processors()) == 2
    assert threads.threads_beside(0.0) is None
    assert threads.threads_beside(1.0) == 1
    assert threads.threads_beside(40.0) == 1
    assert asked == [(1, 2), (1, 2)]
    monkeypatch.delattr(os, "sched_getaffinity")
    assert threads.threads_beside(40.0) is None
    assert threads.threads_beside(63.0) == 1


def test_the_comparison_prefers_the_faster_number(monkeypatch):
    clock, current = [0.0], [1]
    monkeypatch.setattr(torch, "set_num_threads", lambda count: current.__setitem__(0, count))
    for slow in (1, 2):

        def now(slow=slow):
            clock[0] += 2.0 if current[0] == slow else 1.0
            return clock[0]

        monkeypatch.setattr(threads.time, "perf_counter", now)
        assert threads.faster(1, 2) is (slow == 2)


def test_a_run_stores_the_number_it_began_with_and_resumes_with_it(tmp_path, monkeypatch, capsys):
    recipe = RlRecipe(environment={"type": "bandit"}, name="run", runs=str(tmp_path), model={"device": "cpu"})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "busy_processors", lambda: 3.0)
    monkeypatch.setattr(threads, "threads_beside", lambda busy: 1)
    begun = with_threads(recipe, False, Console())
    assert begun.model.threads == 1
    assert "model.threads is 1: 3 other threads are busy" in capsys.readouterr().out
    RunDirectory.create(begun)
    monkeypatch.setattr(threads, "threads_beside", lambda busy: None)
    assert with_threads(recipe, True, Console()).model.threads == 1
    assert with_threads(recipe, False, Console()) is recipe
    chosen = recipe.model_copy(update={"model": recipe.model.model_copy(update={"threads": 4})})
    assert with_threads(chosen, True, Console()) is chosen
