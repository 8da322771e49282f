"""Which GPUs workers see, and where engines stage weights, without a cluster and without GPUs."""

import os
from types import SimpleNamespace

import pytest

from posttrain.distributed.ray import actors, models
from posttrain.distributed.ray.launch import ClusterRun
from posttrain.planning.workers import ENGINE, ENVIRONMENTS, LEARNER, Worker
from posttrain.recipe.compose import load_recipe

ray = pytest.importorskip("ray", reason="needs the package ray: pip install 'posttrain[ray]'")


@pytest.fixture
def worker_alone(monkeypatch, tmp_path):
    """Workers can be made without a cluster; they change the current folder."""
    monkeypatch.setattr(ray, "get_actor", lambda name: None)
    monkeypatch.setattr(actors, "HeartbeatSender", lambda *arguments: None)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def started():
    """Creates the actor of a worker with a `ray` that records its options and arguments."""
    calls = []

    class Remote:
        def options(self, **options):
            calls.append(options)
            return self

        def remote(self, *arguments):
            calls[-1]["arguments"] = arguments

    def start(worker):
        run = object.__new__(ClusterRun)
        run.ray = SimpleNamespace(remote=lambda kind: Remote())
        run.recipe = load_recipe([], ["environment.type=bandit", "hardware.ray=auto"], "rl")
        run._group, run.bundle_of, run.actors = None, {worker.name: 0}, {}
        run.monitor_name, run.heartbeat_seconds = "monitor", 1.0
        run.locations = [("", 0, "", [3], 0)]
        run._create_actor(object, worker, (), 0)
        return calls[-1]["arguments"][-1]

    return start


def test_a_worker_that_requests_no_gpu_sees_none(started):
    assert started(Worker(ENVIRONMENTS, 0, 0.5, 0)) == ()
    assert started(Worker(LEARNER, 0, 1.0, 1)) is None, "Ray assigns them"
    assert started(Worker(ENGINE, 0, 1.0, 0, colocated=True)) == (3,)


def test_a_worker_hides_the_gpus_it_does_not_use(worker_alone, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    for devices, visible in ((None, "0,1,2,3"), ((2, 3), "2,3"), ((), "")):
        actors.Worker("a", "monitor", 1.0, str(tmp_path), devices)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


def test_an_engine_of_vllm_stages_weights_in_cpu_memory():
    keys = ["environment.type=bandit", "model.dtype=bfloat16"]
    local, vllm = (load_recipe([], [*keys, f"engine.type={kind}"], "rl") for kind in ("local", "vllm"))
    assert actors.staged_model(local) is local.model
    assert (actors.staged_model(vllm).device, actors.staged_model(vllm).dtype) == ("cpu", "bfloat16")
    keys += ["engine.type=vllm", "model.load_in_4bit=true", "model.lora.rank=4", "model.fused=liger"]
    staged = actors.staged_model(load_recipe([], keys, "rl"))
    assert (staged.load_in_4bit, staged.fused) == (False, "auto")


@pytest.mark.parametrize("kind", ["EngineWorker", "ReferenceWorker", "RewardWorker"])
def test_workers_with_a_model_use_the_kernels_of_the_recipe(kind, worker_alone, monkeypatch, tmp_path):
    class Chosen(Exception):
        pass

    def chosen(hardware, device):
        assert hardware.deterministic
        raise Chosen

    monkeypatch.setattr(actors, "use_deterministic_kernels", chosen)
    keys = ["environment.type=bandit", "hardware.ray=auto", "hardware.deterministic=true"]
    worker = getattr(models if kind == "ReferenceWorker" else actors, kind)
    with pytest.raises(Chosen):
        worker(load_recipe([], keys, "rl").model_dump_json(), "a", "monitor", 1.0, str(tmp_path), None)
