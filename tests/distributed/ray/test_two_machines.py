"""A run on a cluster of two machines that share a file system and nothing else: network namespaces with a link between them."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.training import small

HEAD, OTHER = 0, 1
CORES = 2
"""Of each machine: three learners and an engine, of one core each, fill both, and the learners are on both."""
STARTED = "Ray runtime started"


class Machines:
    """Two namespaces, each with a node of one Ray cluster."""

    def __init__(self, folder: Path, logs: Path) -> None:
        self.names = [f"pt{os.getpid()}m{number}" for number in (HEAD, OTHER)]
        self.folder, self.logs = folder, logs
        self.environment = os.environ | {
            "RAY_worker_niceness": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            # From Ray 2.60 on, a first node asks others for the token of its user if there is one, and they do not send it.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "OMP_NUM_THREADS": "1",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_failure_threshold": "5",
            "RAY_health_check_initial_delay_ms": "1000",
        }
        self.nodes: dict[int, subprocess.Popen] = {}

    @staticmethod
    def address(machine: int) -> str:
        return f"10.77.{os.getpid() % 250}.{machine + 1}"

    @property
    def cluster(self) -> str:
        return f"{self.address(HEAD)}:6379"

    def connect(self) -> None:
        """Make the namespaces and the link."""
        links = [f"v{name}" for name in self.names]
        for name in self.names:
            command("ip", "netns", "add", name)
        command("ip", "link", "add", links[HEAD], "type", "veth", "peer", "name", links[OTHER])
        for machine, (name, link) in enumerate(zip(self.names, links, strict=True)):
            command("ip", "link", "set", link, "netns", name)
            command("ip", "-n", name, "addr", "add", f"{self.address(machine)}/24", "dev", link)
            for device in (link, "lo"):
                command("ip", "-n", name, "link", "set", device, "up")

    def start(self, machine: int) -> None:
        """Start the node of a machine, and wait for it."""
        where = ["--head", "--port", "6379", "--include-dashboard=false", "--temp-dir", str(self.folder)]
        where = where if machine == HEAD else ["--address", self.cluster]
        settings = [
            f"--node-ip-address={self.address(machine)}",
            f"--num-cpus={CORES}",
            "--object-store-memory=100000000",
        ]
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        log = self.logs / f"log{machine}.txt"
        before = log.read_text().count(STARTED) if log.exists() else 0
        node = self.nodes[machine] = self.popen(machine, *ray, *where, *settings)
        waited(lambda: log.read_text().count(STARTED) > before, 200, node, log)

    def popen(self, machine: int, *words: str, **keys) -> subprocess.Popen:
        """Start a command on a machine."""
        log = (self.logs / f"log{machine}.txt").open("a")
        inside = ["ip", "netns", "exec", self.names[machine], *words]
        return subprocess.Popen(inside, env=self.environment, stdout=log, stderr=log, **keys)

    def lose(self, machine: int) -> None:
        """Kill every process of a machine at once."""
        for pid in command("ip", "netns", "pids", self.names[machine]).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        self.nodes[machine].wait()

    def close(self) -> None:
        for machine, name in enumerate(self.names):
            if machine in self.nodes:
                self.lose(machine)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def command(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def machines(tmp_path):
    pytest.importorskip("ray", reason="needs the package ray: pip install 'posttrain[ray]'")
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    # Paths of sockets are short.
    folder = Path(f"/tmp/pt-two-{os.getpid()}")
    made = Machines(folder, tmp_path)
    try:
        try:
            made.connect()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this kernel makes no network namespaces: {error.stderr}")
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


def waited(condition, seconds: float, process: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_run_on_two_machines_loses_one_and_gets_it_back(machines, tiny_model, tmp_path):
    alone, runs, recipe = (tmp_path / name for name in ("alone", "runs", "recipe.yaml"))
    alone.mkdir()
    values = small.recipe_values(tiny_model, alone)
    values |= {"steps": 12}
    values["rollout"]["groups_per_step"] = 3
    assert small.run(values) == 0, (alone / "log.txt").read_text()
    hardware = {"ray": machines.cluster, "processes": 3, "environments": {"count": 0}}
    recipe.write_text(json.dumps(values | {"runs": str(runs), "hardware": hardware}))
    machines.start(HEAD)
    machines.start(OTHER)
    posttrain = [sys.executable, "-m", "posttrain.cli.main", "rl", str(recipe)]
    run = machines.popen(HEAD, *posttrain, cwd=Path(__file__).parents[3])
    metrics = runs / "small" / "metrics.jsonl"
    waited(lambda: metrics.exists() and '"kind": "train"' in metrics.read_text(), 300, run, tmp_path / "log0.txt")
    machines.lose(OTHER)
    machines.start(OTHER)
    assert run.wait(400) == 0, (tmp_path / "log0.txt").read_text()
    told = [line["message"] for line in small.metrics(runs / "small") if line["kind"] == "warning"]
    # Ray may notice the death of a machine only after that of the processes on it.
    assert any(
        "learner" in message and "all learners continued from the last checkpoint" in message for message in told
    )
    expected, learned = (
        [line for line in small.metrics(folder / "small") if line["kind"] == "train"] for folder in (alone, runs)
    )
    assert [line["step"] for line in learned] == [line["step"] for line in expected] == list(range(1, 13))
    for key in ("rollout/return", "loss/total", "optimizer/gradient_norm"):
        assert learned[0][key] == pytest.approx(expected[0][key], rel=1e-4, abs=1e-6), key
