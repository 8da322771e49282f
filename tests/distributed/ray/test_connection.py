"""A cluster that a run starts, which serves this machine only."""

import json
import subprocess
import sys

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
