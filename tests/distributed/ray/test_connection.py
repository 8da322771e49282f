"""A cluster that a run starts, which serves this machine only."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

STARTED = """
import json
import psutil
from posttrain.distributed.ray.connection import connected

with connected("auto") as ray:
    node = ray._private.worker._global_node
    processes = [one.process.pid for kind in node.all_processes.values() for one in kind]
    addresses = [c.laddr.ip for pid in processes for c in psutil.Process(pid).net_connections("tcp") if c.status == "LISTEN"]
    addresses += [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
    print(json.dumps([ray.nodes()[0]["NodeManagerAddress"], *addresses]))
"""


@pytest.mark.slow
def test_a_cluster_of_a_run_listens_on_the_loopback_address(tmp_path):
    pytest.importorskip("ray", reason="needs the package ray: pip install 'posttrain[ray]'")
    pytest.importorskip("psutil")
    done = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, check=True, cwd=tmp_path)
    address, *listening = json.loads(done.stdout.splitlines()[-1])
    assert address == "127.0.0.1"
    assert len(listening) >= 3, "the servers of the head, the node and the driver"
    assert {one.removeprefix("::ffff:") for one in listening} == {"127.0.0.1"}


CONNECT = """
import sys
from posttrain.distributed.ray.connection import connected

try:
    with connected(sys.argv[1]) as ray:
        print(len(ray.nodes()), "node")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_a_cluster_that_asks_for_a_token_says_how_to_give_it(tmp_path):
    ray = pytest.importorskip("ray", reason="needs the package ray: pip install 'posttrain[ray]'")
    if not hasattr(ray.exceptions, "AuthenticationError"):
        pytest.skip("this ray has no tokens")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"
    plain = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"} | {"HOME": str(tmp_path)}
    token = plain | {"RAY_AUTH_MODE": "token"}
    options = [f"--port={address.rpartition(':')[2]}", "--include-dashboard=false"]
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=1", *options]
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0123456789abcdef" * 4)
    with (tmp_path / "log.txt").open("w") as log:
        head = subprocess.Popen(command, env=token, stdout=log, stderr=log)
    try:
        while "Ray runtime started" not in (tmp_path / "log.txt").read_text():
            assert head.poll() is None, (tmp_path / "log.txt").read_text()
        words = [sys.executable, "-c", CONNECT, address]
        said = subprocess.run(words, env=plain, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    finally:
        head.terminate()
        head.wait()
    assert said.startswith("InputError hardware.ray: ")
    assert "RAY_AUTH_MODE=token" in said
