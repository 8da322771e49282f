"""Weights of vLLM without files: memory that processes on one GPU share, and a broadcast. Between CPUs gloo is the real thing."""

import asyncio
import importlib
import inspect
import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from pydantic import ValidationError

from posttrain.distributed import world
from posttrain.engines.vllm import engine as vllm_engine
from posttrain.engines.vllm import transfer
from posttrain.engines.vllm.engine import VllmEngine, refuse_transfer
from posttrain.errors import InputError, RunError
from posttrain.recipe.engines import VllmEngineRecipe
from posttrain.recipe.hardware import HardwareRecipe
from tests.distributed import together
from tests.engines.test_vllm_engine import Made, MadePolicy, ask_all

BUCKET = {
    "a": torch.arange(5, dtype=torch.bfloat16),
    "b": torch.randn(3, 2),
    "c": torch.tensor([True, False, True]),
    "d": torch.randn(4, 6).t(),
}


def assert_equal(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_bucket_is_one_buffer():
    buffer, entries = transfer.packed(BUCKET)
    assert all(start % transfer.ALIGNMENT == 0 for *_, start in entries)
    assert_equal(dict(transfer.unpacked(buffer.clone(), json.loads(json.dumps(entries)))), BUCKET)


def test_shared_memory_is_described_in_json(monkeypatch):
    """Torch's functions need a GPU. Their arguments are those of the installed version."""
    from torch.multiprocessing import reductions

    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert names[:6] == ["tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype"]
    assert len(names) == 7 + len(transfer._FIELDS)
    assert all(ours.split("_")[0] in theirs for ours, theirs in zip(transfer._FIELDS, names[7:], strict=True))
    tail = (b"\x00handle", 512, 64, False, b"\xffcounter", 8, b"event", True)
    monkeypatch.setattr(reductions, "reduce_tensor", lambda buffer: (None, (*range(7), *tail)))
    given = []
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *arguments: given.append(arguments))
    transfer.opened_memory(json.loads(json.dumps(transfer.shared_memory(torch.zeros(48, dtype=torch.uint8)))), 3)
    (arguments,) = given
    assert arguments[1:7] == (torch.Size([48]), (1,), 0, torch.UntypedStorage, torch.uint8, 3)
    assert arguments[7:] == tail


class Receiver(Made):
    """A replica that receives buffers, as two workers do where it joins a group."""

    shared: dict = {}

    async def join_transfer(self, address, port, first, size):
        self.joined = (first, size)
        ranks = range(first, first + self.workers)
        self.groups = await asyncio.gather(
            *(asyncio.to_thread(transfer.joined_group, address, port, rank, size, False) for rank in ranks)
        )

    workers = 1

    async def receive_buffer(self, described):
        if self.deaths_in_transfer:
            self.groups = []  # a process that dies closes its connections
            raise vllm_engine.EngineDied("killed")
        buffers = [torch.empty(described.get("size", 0), dtype=torch.uint8) for _ in range(self.workers)]
        if "shared" in described:
            buffers = [self.shared[described["shared"]["gpu"]["id"]].clone()]
        else:
            work = zip(self.groups, buffers, strict=True)
            await asyncio.gather(*(asyncio.to_thread(transfer.broadcast, *each) for each in work))
        for buffer in buffers:
            self.got |= dict(transfer.unpacked(buffer, described["entries"]))

    deaths_in_transfer = 0

    async def receive_weights(self, path):
        self.files = [*getattr(self, "files", []), path]
        await super().receive_weights(path)


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    monkeypatch.setattr("posttrain.engines.vllm.engine.BUCKET_BYTES", 2**20)


def opened(replicas, policy=None, **keys):
    settings = VllmEngineRecipe(max_num_seqs=4, servers=len(replicas) or 1, **keys)
    return VllmEngine(policy or MadePolicy(), settings, replicas)


def test_a_broadcast_reaches_every_worker_and_the_group_is_kept():
    replicas = [Receiver("a"), Receiver("b")]
    for replica in replicas:
        replica.workers = 2
    engine = opened(replicas, weight_transfer="nccl", tensor_parallel=2)
    for version, number in ((1, 5.0), (2, 6.0)):
        engine.policy.number = number
        engine.load_weights(version)
        assert {one.ids[0] for one in ask_all(engine, range(4))} == {int(number)}
    assert [replica.joined for replica in replicas] == [(1, 5), (3, 5)]
    assert not any(hasattr(replica, "files") for replica in replicas)
    engine.close()


def test_a_restarted_replica_gets_files_and_joins_again_and_a_death_in_a_broadcast_stops_the_run():
    replica = Receiver("a", deaths=1)
    engine = opened([replica], weight_transfer="nccl")
    engine.load_weights(1)
    assert {one.ids[0] for one in ask_all(engine, range(2))} == {5}
    assert replica.starts == 2
    assert len(replica.files) == 3
    first = replica.groups
    engine.policy.number = 7.0
    engine.load_weights(2)
    assert replica.groups is not first
    assert {one.ids[0] for one in ask_all(engine, range(2))} == {7}
    assert len(replica.files) == 3
    replica.deaths_in_transfer = 1
    with pytest.raises(RunError, match=r"could not be sent to every vLLM worker.*--resume.*weight_transfer=files"):
        engine.load_weights(3)
    engine.close()


def test_memory_of_one_gpu_is_shared_bucket_by_bucket(monkeypatch):
    order = []
    stream = SimpleNamespace(synchronize=lambda: order.append("synchronized"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: order.append("collected"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="gpu"))

    def shared(buffer):
        order.append("shared")
        Receiver.shared = {len(order): buffer}
        return {"id": len(order)}

    monkeypatch.setattr(vllm_engine, "shared_memory", shared)
    policy = MadePolicy()
    policy.device = torch.device("cuda")
    engine = opened([Receiver("a")], policy, weight_transfer="ipc")
    engine.load_weights(1)
    assert {one.ids[0] for one in ask_all(engine, range(2))} == {5}
    assert order == ["synchronized", "shared", "collected"] * 3
    engine.close()


class Files(Made):
    """Opens the buffers of all learner processes, which are files here."""

    async def receive_buffer(self, described):
        await asyncio.sleep(0.2)  # the other processes are ready long before
        handles = described["shared"]
        assert sorted(handles) == ["gpu-0", "gpu-1"]
        first, second = (torch.load(handles[name]["file"]) for name in sorted(handles))
        assert torch.equal(first, second)
        self.got |= dict(transfer.unpacked(first, described["entries"]))


def send(folder, kind):
    """Both processes of a sharded learner send weights twice; only rank 0 has a replica."""
    rank, kept = world.current_world().rank, []
    policy = MadePolicy()
    if kind == "ipc":
        policy.device = torch.device("cuda")
        torch.cuda.current_stream = lambda device: SimpleNamespace(synchronize=lambda: None)
        torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=f"gpu-{rank}")
        torch.cuda.ipc_collect = lambda: kept.pop().unlink()  # the memory is free from now on

        def shared(buffer):
            kept.append(folder / f"buffer-{rank}")
            torch.save(buffer, kept[-1])
            return {"file": str(kept[-1])}

        vllm_engine.shared_memory = shared
    vllm_engine.BUCKET_BYTES = 2**20
    engine = opened([(Files if kind == "ipc" else Receiver)("a")] if rank == 0 else [], policy, weight_transfer=kind)
    for version, number in ((1, 5.0), (2, 6.0)):
        policy.number = number
        engine.load_weights(version)
        assert rank > 0 or {one.ids[0] for one in ask_all(engine, range(2))} == {int(number)}
    engine.close()


def test_processes_that_share_a_model_send_its_weights(tmp_path):
    jobs = [{"call": send, "arguments": (tmp_path, kind)} for kind in ("ipc", "nccl")]
    codes = together.run(2, jobs, tmp_path)
    assert codes == [[0, 0]] * 2, (tmp_path / "log-0.txt").read_text()[-3000:]


def test_a_worker_loads_what_it_receives(monkeypatch):
    for name in ("vllm", "vllm.distributed.weight_transfer.base", "vllm.model_executor.model_loader.reload"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    base = sys.modules["vllm.distributed.weight_transfer.base"]
    base.WeightTransferEngine = type("Engine", (), {"__class_getitem__": classmethod(lambda cls, kinds: cls)})
    base.WeightTransferEngine.parse_update_info = lambda self, part: self.update_info_cls(**part)
    base.WeightTransferInitInfo = base.WeightTransferUpdateInfo = object
    monkeypatch.delitem(sys.modules, "posttrain.engines.vllm.receiver", raising=False)
    receiver = importlib.import_module("posttrain.engines.vllm.receiver")
    loaded = {}
    buffer, entries = transfer.packed(BUCKET)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="gpu-1"))
    monkeypatch.setattr(receiver, "opened_memory", lambda shared, device: {1: buffer}[shared])
    weights = receiver.TrainerWeights()
    weights.device, weights.model = torch.device("cpu"), SimpleNamespace(load_weights=loaded.update)
    weights.update_weights({"shared": {"gpu-0": 0, "gpu-1": 1}, "entries": entries})
    before = {name: tensor.clone() for name, tensor in loaded.items()}
    buffer.zero_()
    assert_equal(loaded, BUCKET)
    assert_equal(before, BUCKET)
    monkeypatch.setattr(receiver, "broadcast", lambda group, into: into.fill_(0))
    weights.update_weights({"size": len(buffer), "entries": entries})
    assert float(loaded["b"].abs().sum()) == 0


def test_settings_that_do_not_fit_are_refused():
    for keys, reason in (
        ({"weight_transfer": "ipc", "urls": ["http://a:1"]}, "servers that the run starts"),
        ({"weight_transfer": "nccl", "adapters": "adapter_only"}, "`adapters: adapter_only` sends files"),
    ):
        with pytest.raises(ValidationError, match=reason):
            VllmEngineRecipe(**keys)
    with pytest.raises(InputError, match=r"ipc needs the policy on a GPU"):
        opened([Made("a")], weight_transfer="ipc")


NCCL, IPC = {"weight_transfer": "nccl"}, {"weight_transfer": "ipc"}


@pytest.mark.parametrize(
    ("device", "size", "keys", "reason"),
    [
        ("cuda:0", 1, NCCL, r"set engine\.first_device=1"),
        ("cuda:2", 1, NCCL | {"servers": 2, "tensor_parallel": 2}, "the learner's GPU 2"),
        ("cuda:0", 1, IPC | {"first_device": 1}, r"set engine\.first_device=0"),
        ("cuda:0", 1, IPC | {"tensor_parallel": 2}, "GPU 1 is none"),
        ("cuda:0", 4, IPC | {"servers": 2, "tensor_parallel": 2}, None),
        ("cuda:0", 4, NCCL | {"first_device": 3}, r"set engine\.first_device=4"),
        ("cuda:0", 4, NCCL | {"first_device": 4, "servers": 4}, None),
        ("cuda:0", 1, NCCL | {"first_device": 1}, None),
        ("cuda:0", 1, NCCL | {"urls": ["http://a:1"]}, None),
    ],
)
def test_gpus_that_do_not_fit_are_refused(device, size, keys, reason, monkeypatch):
    monkeypatch.setitem(world._state, "world", world.World(HardwareRecipe(), 0, size))
    policy = MadePolicy()
    policy.device = torch.device(device)
    with pytest.raises(InputError, match=reason) if reason else nullcontext():
        refuse_transfer(VllmEngineRecipe(**keys), policy)
