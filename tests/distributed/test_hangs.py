"""Processes that stop responding, or wait for each other, end the run with the process and its line."""

import os
import signal
import sys
import threading
import time
from multiprocessing.util import Finalize

import pytest
import torch

from posttrain.distributed import hangs
from posttrain.distributed.sharding import ShardedModel, full_tensor
from posttrain.distributed.world import control_group, current_world
from posttrain.errors import InputError
from tests.training import small

from . import together


def report(**changes):
    return {"beat_at": 100.0, "moved_at": 100.0, "blocked": True, "line": "training/updater.py:246 (update)"} | changes


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        ({0: report(), 1: report()}, None),
        ({0: report(moved_at=0.0), 1: report()}, None),
        ({0: report(moved_at=0.0), 1: report(moved_at=0.0, blocked=False)}, None),
        ({0: report(moved_at=0.0), 1: report(moved_at=0.0, line="rollout/store.py")}, "process 1 at rollout/store"),
        ({0: report(beat_at=0.0), 1: report()}, None),
        ({0: report(), 1: report(beat_at=0.0)}, "process 1 of the run has not responded for 700 s, last at training/"),
    ],
    ids=["calls", "one waits", "an engine", "all wait", "itself", "silent"],
)
def test_what_hangs(reports, words):
    for one in reports.values():
        one["beat_at"] += 600 * (one["beat_at"] > 0)
        one["moved_at"] += 600 * (one["moved_at"] > 0)
    found = hangs.find_hang(reports, 700.0, 0)
    assert found is None if words is None else words in found


def test_the_line_of_a_thread_and_what_it_waits_for():
    ready, go_on = threading.Event(), threading.Event()

    def work():
        ready.set()
        go_on.wait()

    thread = threading.Thread(target=work)
    waiting = threading.Thread(target=thread.join)
    for one in (thread, waiting):
        one.start()
    ready.wait()
    time.sleep(0.05)
    for one in (thread, waiting):
        place, waits = hangs.place_of(one.ident)
        assert (place.startswith("threading.py:"), place.endswith("(wait)"), waits) == (True, True, False)
    go_on.set()
    waiting.join()
    assert not hangs.place_of(threading.get_ident())[1]
    assert hangs.place_of(-1) == ("its end", False)


def hung(kind):
    """Two processes, of which one stops or fails, or which wait for each other in different calls."""
    world, model = current_world(), torch.nn.Linear(4, 4)
    weight = ShardedModel(model, [], torch.device("cpu")) and model.weight
    world.barrier()
    time.sleep(2)
    if kind == "suspended":
        if os.fork() == 0:  # both are stopped for longer than the limit, as by Ctrl-Z
            time.sleep(9)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(4)
    if kind == "stopped" and world.rank == 1:
        if os.fork() == 0:  # somebody looks at its machine
            time.sleep(25)
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "crossed" and world.rank == 1:
        torch.distributed.all_reduce(torch.zeros(1), group=control_group(background=True))
    if kind == "crossed":
        full_tensor(weight)
    if kind == "writers":  # threads that write a checkpoint, for which the processes wait
        thread = threading.Thread(target=world.gather, args=([], world.rank == 0))
        thread.start()
        thread.join()
    if kind == "failed" and world.rank == 1:
        Finalize(None, time.sleep, (15,), exitpriority=10)  # the process goes on, and so do its connections
        raise InputError("broken")
    print("waiting", file=sys.stderr, flush=True)
    world.barrier()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind", small.cases(("crossed", "stopped", "writers", "failed", "busy", "suspended"), "crossed")
)
def test_a_run_that_hangs_ends(kind, tmp_path, monkeypatch):
    arguments = (busy, ()) if kind == "busy" else (hung, (kind,))
    codes = together.run(2, [{"call": limited, "arguments": arguments}], tmp_path)
    logs = "".join((tmp_path / f"log-{rank}.txt").read_text() for rank in range(2))
    if kind in ("busy", "suspended"):
        assert codes == [[0, 0]], logs
        assert logs.count("process 1 has waited for 5 s at") == (kind == "busy"), logs
        return
    if kind == "failed":
        assert codes == [[-1, 2]], logs
        assert "process 0 ends at" in logs
        return
    assert -1 in codes[0], logs
    assert 0 not in codes[0], logs
    expected = "process 1 of the run has not responded" if kind == "stopped" else "processes of the run have waited"
    assert logs.count(expected) == 1, logs
    assert ("process 0 at distributed/sharding.py" in logs) == (kind == "crossed"), logs
    assert "--resume" in logs


def busy():
    """One process works for longer than the limit, as rank 0 does in a rollout."""
    current_world().on_rank0(lambda: threading.Event().wait(12))


def limited(work, arguments):
    hangs.LIMIT, hangs.GRACE = 5.0, 3.0
    current_world().barrier()
    time.sleep(6)  # until the thread has read the limit
    work(*arguments)
