"""What the processes of a run tell each other, and the limits of their calls."""

import json
import threading
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from posttrain.distributed import hangs, world
from posttrain.distributed.ray.engine import RayEngine
from posttrain.distributed.world import current_world
from posttrain.errors import InputError
from posttrain.recipe.hardware import HardwareRecipe
from tests.distributed import together


def told(folder):
    world = current_world()
    gathering, dist.all_gather_object = dist.all_gather_object, None
    numbers = world.on_rank0(lambda: np.arange(100_000) if world.is_rank0 else None)
    with pytest.raises(InputError, match="broken"):
        world.on_rank0(fails)
    dist.all_gather_object = gathering
    ranks = world.on_all_ranks(lambda: world.rank)
    (folder / f"told-{world.rank}.json").write_text(json.dumps([int(numbers.sum()), ranks]))


def fails():
    raise InputError("broken")


def test_results_of_rank_0_are_sent_once(tmp_path):
    together.succeed(2, [{"call": told, "arguments": (tmp_path,)}], tmp_path)
    for rank in range(2):
        assert json.loads((tmp_path / f"told-{rank}.json").read_text()) == [sum(range(100_000)), [0, 1]]


def test_engines_fall_asleep_at_the_same_time():
    together_ = threading.Barrier(3)
    workers = [SimpleNamespace(restarts=0, call_once=lambda *_: together_.wait(20)) for _ in range(3)]
    RayEngine(None, workers, 1, False, is_rank0=True).sleep()
    RayEngine(None, [SimpleNamespace(restarts=0)], 1, False, is_rank0=False).sleep()


def test_calls_of_nccl_have_the_limit_of_hangs_and_those_of_gloo_wait_for_rollouts(monkeypatch):
    """The group of a GPU cannot be made here; what it would be made with is read."""
    made = []
    monkeypatch.setattr(dist, "rendezvous", lambda _: iter([(dist.HashStore(), 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **keys: made.append((backend, keys["timeout"])))
    monkeypatch.setattr(dist, "new_group", lambda *_, backend, timeout: made.append((backend, timeout)))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", lambda _: None)
    monkeypatch.setattr("faulthandler.enable", lambda _: None)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name in ("control", "background", "sequence"):
        monkeypatch.setitem(world._state, name, None)
    hardware = HardwareRecipe(processes=2, sequence_parallel=2)
    world._connect(world.World(hardware, 0, 2, 0, 2), on_gpu=True)
    limit, week = timedelta(seconds=hangs.LIMIT), timedelta(days=7)
    assert made == [("cpu:gloo,cuda:nccl", limit), ("gloo", week), ("gloo", week), ("cpu:gloo,cuda:nccl", limit)]
