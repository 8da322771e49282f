"""Runs on a real local cluster: the same bits as in one process, even if workers die or hang."""

import io
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter
from rich.console import Console
from safetensors.torch import load_file

from posttrain.distributed.ray.launch import ClusterRun
from posttrain.errors import RunError
from posttrain.recipe.stages import Recipe
from tests.distributed.ray.conftest import CORES, Disturber
from tests.training import small

ENGINE = {"type": "local", "slots": 6}


def values(tiny, runs, **changes):
    return small.recipe_values(tiny, runs, engine=ENGINE, **changes)


def launched(made, resume=False):
    """A run of these values on the cluster that the tests are connected to."""
    import ray

    Path(made["runs"]).mkdir(exist_ok=True)
    recipe = TypeAdapter(Recipe).validate_python(made)
    return ClusterRun(recipe, resume, False, Console(file=io.StringIO(), width=1000), ray)


def run_placed(made, resume=False):
    """Run it, or continue it; returns the run."""
    found = launched(made, resume)
    try:
        found.run()
    finally:
        found.close()
    return found


def run_disturbed(made, disturb):
    """Run it in a thread while `disturb` works beside it; returns the deaths and what was shown.

    Machines of a test's cluster come and go in the main thread only.
    """
    import ray

    found, failures = launched(made), []

    def run():
        try:
            found.run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
        disturb(Disturber(found, Path(made["runs"]) / made["name"]))
        thread.join()
        deaths = [] if failures else ray.get(found.monitor.all_deaths.remote())
    finally:
        found.close()
    if failures:
        raise failures[0]
    return deaths, found.console.file.getvalue()


def warnings(run):
    return [line["message"] for line in small.metrics(run) if line["kind"] == "warning"]


def without_warnings(run):
    # The start gate of a run on a cluster does not cover the engine, which is another process.
    return [line for line in small.metrics(run) if line["kind"] not in ("warning", "preflight")]


def weights(run):
    """All but torch's own random numbers, which loading a reward model in the process moves on and nothing here uses."""
    return {name: content for name, content in small.weights(run).items() if not name.startswith("random/")}


def assert_same(one, other):
    assert len(weights(one)) > 20
    assert weights(one) == weights(other)
    assert small.episodes(one) == small.episodes(other)
    assert without_warnings(one) == without_warnings(other)


@pytest.fixture(scope="module")
def undisturbed(tiny_model, paid, tmp_path_factory):
    """The run in one process, without Ray."""
    runs = tmp_path_factory.mktemp("undisturbed")
    assert small.run(values(tiny_model, runs, **paid)) == 0, (runs / "log.txt").read_text()
    return runs / "small"


@pytest.mark.slow
def test_deaths_of_the_monitor_and_of_an_engine_do_not_change_the_bits(
    cluster, tiny_model, paid, undisturbed, tmp_path
):
    """Ray restarts the monitor, which then counts the death of the engine."""
    import ray

    def disturb(disturber):
        disturber.until(0)
        monitor = disturber.launched.monitor
        os.kill(ray.get(monitor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        disturber.until(1)
        disturber.signal("engine 0")

    made = values(tiny_model, tmp_path / "runs", hardware={"ray": "auto"}, **paid)
    deaths, _ = run_disturbed(made, disturb)
    assert any(death.startswith("engine 0 died: its process was killed or crashed") for death in deaths), deaths
    assert_same(undisturbed, tmp_path / "runs" / "small")


@pytest.mark.slow
def test_a_worker_of_each_kind_dies_and_one_hangs_and_the_bits_are_the_same(
    cluster, tiny_model, paid, undisturbed, tmp_path, monkeypatch
):
    """Engine, environments, reward model, learner, each killed during the run; then the engine is stopped."""
    hardware = {"ray": "auto", "rewards": {"count": 1}, "environments": {"count": 1}}
    monkeypatch.setattr("posttrain.distributed.ray.launch.HANG_SECONDS", 12.0)
    victims = []

    def disturb(disturber):
        disturber.until(0)
        victims.append(disturber.signal("engine 0"))
        disturber.until(1)
        victims.append(disturber.signal("environments 0"))
        victims.append(disturber.signal("reward model 0"))
        disturber.until(2)
        victims.append(disturber.signal("learner 0"))
        disturber.until(3)
        stopped = disturber.pid("engine 0", not_pid=victims[0])
        os.kill(stopped, signal.SIGSTOP)
        victims.append(stopped)

    made = values(tiny_model, tmp_path / "runs", hardware=hardware, **paid)
    deaths, shown = run_disturbed(made, disturb)
    assert len(victims) == 5
    for name in ("engine 0", "environments 0", "reward model 0", "learner 0"):
        assert any(death.startswith(f"{name} died: its process was killed or crashed") for death in deaths), deaths
    hung = [death for death in deaths if death.startswith("engine 0 hung")]
    assert hung
    assert "learner 0 waits for engine 0" in hung[0]
    assert "engine 0 has sent no heartbeat for" in hung[0]
    assert "learner 0 waits for engine 0" in shown
    told = warnings(tmp_path / "runs" / "small")
    assert any("learner 0 died" in message and "continued from the last checkpoint" in message for message in told)
    assert any("engine 0 hung" in message and "restarted" in message for message in told)
    assert_same(undisturbed, tmp_path / "runs" / "small")


@pytest.mark.slow
def test_a_machine_dies_with_all_its_workers(cluster, tiny_model, paid, undisturbed, tmp_path, monkeypatch):
    """The engine, the environments and the reward model go at once; a new machine replaces them."""
    machine = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    machines = [cluster.add_node(**machine)]
    cluster.wait_for_nodes()
    hardware = {"ray": "auto", "rewards": {"count": 1}, "environments": {"count": 1}}
    cores = {"learner": 2.0, "engine": 0.4, "reward model": 0.3, "environments": 0.3}
    monkeypatch.setattr("posttrain.planning.workers.CORES", cores)

    def disturb(disturber):
        disturber.until(1)
        cluster.remove_node(machines.pop(), allow_graceful=False)
        machines.append(cluster.add_node(**machine))

    made = values(tiny_model, tmp_path / "runs", hardware=hardware, **paid)
    try:
        deaths, _ = run_disturbed(made, disturb)
    finally:
        for node in machines:
            cluster.remove_node(node)
    for name in ("engine 0", "environments 0", "reward model 0"):
        assert any(death.startswith(f"{name} died") for death in deaths), deaths
    assert any(" died with its machine " in death for death in deaths), deaths
    assert_same(undisturbed, tmp_path / "runs" / "small")


@pytest.mark.slow
def test_too_many_deaths_stop_the_run_in_one_sentence(cluster, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.distributed.ray.launch.MAX_RESTARTS", 0)
    made = values(tiny_model, tmp_path / "runs", hardware={"ray": "auto"})
    with pytest.raises(RunError, match=r"engine 0 died.*--resume"):
        run_disturbed(made, lambda disturber: (disturber.until(0), disturber.signal("engine 0")))


def tensors(run):
    (file,) = (run / "model").glob("*.safetensors")
    return load_file(file)


@pytest.mark.slow
def test_a_hang_too_many_stops_the_run_and_resuming_gives_the_same_bits(
    cluster, tiny_model, paid, undisturbed, tmp_path, monkeypatch
):
    hardware = {"ray": "auto", "rewards": {"count": 1}}
    monkeypatch.setattr("posttrain.distributed.ray.launch.HANG_SECONDS", 12.0)
    monkeypatch.setattr("posttrain.distributed.ray.launch.MAX_RESTARTS", 0)
    made, stopped = values(tiny_model, tmp_path / "runs", hardware=hardware, **paid), []

    def disturb(disturber):
        disturber.until(1)
        stopped.append(disturber.signal("engine 0", signal.SIGSTOP))

    with pytest.raises(RunError, match=r"engine 0 hung .*no heartbeat for .*--resume"):
        run_disturbed(made, disturb)
    assert ended(stopped[0]), "a process that hangs does not outlive its run"
    run = tmp_path / "runs" / "small"
    assert 1 <= Disturber(None, run).finished() < 4
    run_placed(made, resume=True)
    assert_same(undisturbed, run)


def ended(pid):
    """Whether the process ends within ten seconds."""
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
def test_two_learners_and_two_engines_learn_the_same_to_rounding(cluster, tiny_model, paid, undisturbed, tmp_path):
    """One of the learners is killed; both resume from the last checkpoint."""
    hardware = {"ray": "auto", "processes": 2, "engines": {"count": 2}, "environments": {"count": 1}}

    def disturb(disturber):
        disturber.until(2)
        disturber.signal("learner 1")

    deaths, _ = run_disturbed(values(tiny_model, tmp_path / "runs", hardware=hardware, **paid), disturb)
    assert any(death.startswith("learner") for death in deaths), deaths
    run = tmp_path / "runs" / "small"
    expected, learned = tensors(undisturbed), tensors(run)
    assert list(expected) == list(learned)
    for name, tensor in expected.items():
        torch.testing.assert_close(learned[name], tensor, rtol=1e-4, atol=1e-5)
    one, other = small.episodes(undisturbed), small.episodes(run)
    assert list(one) == list(other)
    for file in one:
        assert [[ids for ids, *_ in streams] for streams in one[file][:1]] == [
            [ids for ids, *_ in streams] for streams in other[file][:1]
        ]


@pytest.mark.slow
def test_a_stopped_run_resumes_to_the_same_bits(cluster, tiny_model, paid, undisturbed, tmp_path):
    made = values(tiny_model, tmp_path / "runs", hardware={"ray": "auto", "rewards": {"count": 1}}, **paid)

    def disturb(disturber):
        disturber.until(1)
        disturber.launched.ray.get(disturber.launched.monitor.stop.remote(["learner 0"]))

    with pytest.raises(KeyboardInterrupt):
        run_disturbed(made, disturb)
    run = tmp_path / "runs" / "small"
    assert Disturber(None, run).finished() < 4
    run_placed(made, resume=True)
    assert_same(undisturbed, run)


@pytest.mark.slow
def test_a_lost_machine_of_a_learner_is_one_death_of_a_learner(cluster, tiny_model, tmp_path, monkeypatch):
    """Its daemon dies; a new machine replaces it. The learner that the run restarts itself is no death."""
    machine = {"num_cpus": 2, "object_store_memory": 100 * 2**20}
    machines = [cluster.add_node(**machine)]
    cluster.wait_for_nodes()
    # One learner on each machine.
    monkeypatch.setattr("posttrain.planning.workers.CORES", {"learner": 1.5, "engine": 0.3, "environments": 0.1})
    # A learner outlives the daemon of its machine by seconds, in which it makes many steps on an idle processor.
    made = values(tiny_model, tmp_path / "runs", hardware={"ray": "auto", "processes": 2}, steps=120)
    victims = []

    def disturb(disturber):
        disturber.until(1)
        nodes = {number: disturber.node(f"learner {number}") for number in range(2)}
        victims.extend(number for number in nodes if nodes[number] == machines[0].node_id)
        (daemon,) = machines[0].all_processes["raylet"]
        daemon.process.kill()
        daemon.process.wait()  # the learner looks for the daemon's process, also for one that nobody has waited for
        machines.append(cluster.add_node(**machine))

    try:
        deaths, _ = run_disturbed(made, disturb)
    finally:
        for node in machines:
            cluster.remove_node(node, allow_graceful=False)
    assert len(victims) == 1
    learners = [death for death in deaths if death.startswith("learner")]
    assert len(learners) == 1, deaths
    assert learners[0].startswith(f"learner {victims[0]} died with its machine "), deaths
    steps = [line["step"] for line in small.metrics(tmp_path / "runs" / "small") if line["kind"] == "train"]
    assert steps == list(range(1, 121))


@pytest.mark.slow
def test_a_run_plans_again_without_a_machine_that_ray_still_counts(cluster, tiny_model, tmp_path):
    """Ray notices only while the run waits that a machine has died."""
    machine = cluster.add_node(num_cpus=CORES, object_store_memory=100 * 2**20)
    cluster.wait_for_nodes()
    cluster.remove_node(machine, allow_graceful=False)
    found = launched(values(tiny_model, tmp_path / "runs", hardware={"ray": "auto"}, steps=1))
    try:
        assert sum(worker.cpus for worker in found.workers) > CORES
        found.run()
    finally:
        found.close()
    assert sum(worker.cpus for worker in found.workers) <= CORES
    assert [line["step"] for line in small.metrics(tmp_path / "runs" / "small") if line["kind"] == "train"] == [1]
