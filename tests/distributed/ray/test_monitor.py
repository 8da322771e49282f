"""Detection of hung workers from their reports, and counts of deaths."""

import io
import socket

import pytest
from rich.console import Console

from posttrain.distributed.ray import monitor
from posttrain.distributed.ray.launch import ClusterRun
from posttrain.distributed.ray.monitor import Heartbeat, PendingCall, WorkerMonitor, WorkerStatus, find_hangs
from posttrain.errors import RunError
from posttrain.recipe.stages import RlRecipe


def known(name, silent=0.0, stuck=0.0, waits=(), doing="models/forward.py:12 hidden"):
    return WorkerStatus(Heartbeat(name, 1, "node", 0, doing, waits), silent, stuck)


def found(*workers, limit=60.0):
    return find_hangs({worker.heartbeat.name: worker for worker in workers}, limit)


def waiting(name="learner 0", target="engine 1", what="12 requests", seconds=63.0, **keys):
    return known(name, waits=[PendingCall(target, what, seconds)], **keys)


@pytest.mark.parametrize(
    "workers",
    [
        (waiting(seconds=500.0), known("engine 1", stuck=3.0)),
        (known("learner 0"), known("engine 1", stuck=9000.0)),
        (waiting(seconds=1.0), known("engine 1", stuck=9000.0)),
    ],
    ids=["progress", "idle", "called now"],
)
def test_no_hang(workers):
    assert found(*workers) == []


@pytest.mark.parametrize(
    ("workers", "name", "words"),
    [
        (
            (waiting(), known("engine 1", silent=62.0)),
            "engine 1",
            "learner 0 waits for engine 1 (12 requests) for 63 s; engine 1 has sent no heartbeat",
        ),
        (
            (waiting(), known("engine 1", stuck=61.0)),
            "engine 1",
            "engine 1 has made no progress for 61 s, in models/forward.py:12 hidden",
        ),
        (
            (
                waiting(target="engine 0", what="3 answers", seconds=70.0),
                waiting("engine 0", "environments 2", "a step", 65.0, stuck=70.0),
                known("environments 2", silent=64.0),
            ),
            "environments 2",
            "learner 0 waits for engine 0 (3 answers) for 70 s; engine 0 waits for environments 2",
        ),
        ((waiting("learner 1", seconds=5.0, silent=61.0), known("engine 1")), "learner 1", "no heartbeat"),
    ],
    ids=["silent", "stuck", "the last of a chain", "a silent learner"],
)
def test_of_a_hang_the_last_waited_for_is_named_with_its_waiters_and_the_time(workers, name, words):
    (hang,) = found(*workers)
    assert hang.name == name
    assert words in hang.sentence


def test_a_worker_without_memory_is_named_and_not_killed():
    (hang,) = found(known("learner 0", waits=[PendingCall("engine 0", "that it is there", 80.0)]))
    assert (hang.name, hang.started) == ("engine 0", False)
    assert "no machine of the cluster has room for it" in hang.sentence


@pytest.fixture
def keeper(monkeypatch):
    monkeypatch.setattr(monitor, "dead_machine", lambda node: "")
    return WorkerMonitor(max_restarts=2)


def beat(name, pid, progress=0):
    return Heartbeat(name, pid, "node", progress, "", ())


def test_a_death_is_counted_once(keeper):
    keeper.heartbeat(beat("engine 0", 10))
    keeper.heartbeat(beat("engine 0", 11))  # its new process
    assert keeper.record_death("engine 0", monitor.KILLED, 10) == (
        "engine 0 died: its process was killed or crashed",
        False,
    )
    assert len(keeper.all_deaths()) == 1
    keeper.record_death("engine 0", monitor.KILLED, 11)
    keeper.heartbeat(beat("engine 0", 12))
    assert len(keeper.all_deaths()) == 2
    assert keeper.record_death("engine 0", monitor.KILLED, 12)[1], "the third of two that are allowed"


@pytest.mark.parametrize("noticed", [False, True])
def test_a_process_that_outlives_its_daemon_dies_once(keeper, noticed):
    """It reports between reports of its successor, which is on another machine and may have the same process id there."""
    keeper.heartbeat(beat("engine 0", 10))
    if noticed:
        keeper.record_death("engine 0", monitor.KILLED, 10)
    for successor in (Heartbeat("engine 0", 11, "other", 0, "", ()), Heartbeat("engine 0", 10, "third", 0, "", ())):
        for report in (successor, beat("engine 0", 10, 1), successor):
            keeper.heartbeat(report)
        assert keeper.statuses()["engine 0"].heartbeat == successor
    assert len(keeper.all_deaths()) == 2


def test_processes_that_the_run_replaces_are_no_deaths(keeper):
    for pid in (10, 11):  # also one that reports only after the run has replaced it
        assert keeper.heartbeat(beat("learner 0", pid)) == (False, [])
    keeper.heartbeat(beat("engine 0", 10))
    keeper.expect_deaths(["engine 0", "engine 1"])
    keeper.heartbeat(beat("engine 0", 11))
    assert keeper.all_deaths() == []
    keeper.heartbeat(beat("engine 0", 12))
    assert len(keeper.all_deaths()) == 1


def test_a_machine_without_a_daemon_is_dead_before_ray_notices(monkeypatch):
    ray = pytest.importorskip("ray", reason="needs the package ray: pip install 'posttrain[ray]'")
    with socket.socket() as daemon:
        daemon.bind(("127.0.0.1", 0))
        address, port = daemon.getsockname()
        state = {"NodeID": "a", "Alive": True, "NodeManagerAddress": address, "NodeManagerPort": port}
        monkeypatch.setattr(ray, "nodes", lambda: [state])
        daemon.listen()
        assert (monitor.dead_machine("a"), monitor.dead_machine("b")) == ("", "")
        daemon.close()
        assert monitor.dead_machine("a") == "died with its machine 127.0.0.1"


def test_the_first_learner_learns_about_unnoticed_deaths(keeper):
    keeper.heartbeat(beat("environments 0", 10))
    keeper.heartbeat(beat("environments 0", 11))
    assert keeper.heartbeat(beat("learner 1", 5)) == (False, [])
    _, news = keeper.heartbeat(beat("learner 0", 4))
    assert news == ["environments 0 died: its process was killed or crashed; it was idle and was restarted"]
    assert keeper.heartbeat(beat("learner 0", 4))[1] == []


def test_progress_and_silence_are_measured_by_the_watch(keeper, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(monitor.time, "monotonic", lambda: now[0])
    for progress, at in ((1, 100.0), (2, 110.0), (2, 130.0)):
        now[0] = at
        keeper.heartbeat(beat("engine 0", 10, progress))
    now[0] = 137.0
    state = keeper.statuses()["engine 0"]
    assert (state.silent, state.stalled) == (7.0, 20.0)


def test_orders_do_not_repeat_and_a_hung_worker_has_the_reason_of_the_monitor(keeper):
    keeper.stop(["learner 0"])
    assert [keeper.heartbeat(beat("learner 0", 1))[0] for _ in range(2)] == [True, False]

    keeper.set_reason("engine 0", "hung (learner 0 waits for it)")
    assert keeper.record_death("engine 0", monitor.KILLED, 10)[0] == "engine 0 hung (learner 0 waits for it)"


def test_an_unreachable_monitor_is_reported_once():
    class Absent:
        def __getattr__(self, name):
            return self

        def remote(self, *arguments):
            return self

        def get(self, answer, timeout):
            raise TimeoutError

    launched = ClusterRun.__new__(ClusterRun)
    launched.recipe, launched.monitor, launched.ray = RlRecipe(), Absent(), Absent()
    launched.console, launched._monitor_unavailable = Console(file=io.StringIO(), width=200), False
    for _ in range(3):
        launched._check_hangs()
    assert launched.console.file.getvalue().count("does not respond (TimeoutError)") == 1


def test_the_death_of_the_first_machine_is_one_sentence(monkeypatch):
    """All workers end with it; the run hears of it from whichever call comes first."""
    ray = pytest.importorskip("ray", reason="needs the package ray: pip install 'posttrain[ray]'")

    def lost(run):
        raise ray.exceptions.ActorDiedError

    monkeypatch.setattr(ClusterRun, "_reserve", lost)
    launched = ClusterRun.__new__(ClusterRun)
    launched.recipe = RlRecipe(name="lost")
    with pytest.raises(RunError, match=r"Ray's daemon on this machine died.*posttrain rl --resume runs/lost"):
        launched.run()
