"""Connect to a Ray cluster, or start one on this machine."""

import importlib
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.distributed.stopping import deleted_with_this_process
from posttrain.errors import InputError, RunError
from posttrain.plugins import require_module

OWNED = "posttrain_run"
"""Resource that marks a cluster started by a run, so that other runs do not use it."""
_CONNECT_SECONDS = 10.0
"""Maximum wait for a cluster address, in seconds. Ray itself would try for minutes and print a line per second."""


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Connect this process to the cluster at `address` inside the block; yields the module ray.

    `auto` uses the cluster that runs on this machine, or starts one that ends with the block. A cluster that another
    run started is not used, because it ends with that run. A process that is already connected stays connected.
    InputError if ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = require_module("ray", "hardware.ray")
    if ray.is_initialized():
        yield ray
        return
    try:
        started = _connect(ray, address)
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        cause = " ".join(str(error).split())
        raise (InputError if address != "auto" else RunError)(
            f"hardware.ray: no connection to a cluster at {address} ({cause}); start one with `ray start --head`, set its "
            "address, or set the variable RAY_AUTH_MODE=token for one that asks for tokens, as Ray does from 2.60 on"
        ) from error
    try:
        with _removed_session(ray) if started else nullcontext():
            yield ray
    finally:
        ray.shutdown()


def _connect(ray: ModuleType, address: str) -> bool:
    """Connect this process; returns whether a cluster was started for it."""
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": True}
    if address != "auto":
        # Addresses in forms other than `host:port` and `ray://host:port` are left to Ray.
        if match := re.fullmatch(r"(?:ray://)?\[?([^\[\]/]+?)\]?:(\d+)", address):
            socket.create_connection((match[1], int(match[2])), _CONNECT_SECONDS).close()
        ray.init(address=address, **quiet)
        return False
    try:
        ray.init(address="auto", **quiet)
        if OWNED not in ray.cluster_resources():
            return False
        ray.shutdown()
    except ConnectionError:
        pass  # no cluster runs on this machine
    services: Any = importlib.import_module("ray._private.services")
    constants: Any = importlib.import_module("ray._private.ray_constants")
    before = services.ConsolePopen, constants.ENABLE_RAY_CLUSTER
    # In process groups of their own, Ray's processes do not get the signals that `timeout` or a batch system sends to the
    # group of this process: the cluster would end before the learners have saved a checkpoint.
    services.ConsolePopen = partial(before[0], process_group=0)
    # With clusters enabled, Ray replaces a loopback address by that of the machine and listens on all interfaces.
    constants.ENABLE_RAY_CLUSTER = False
    started = {"_node_ip_address": "127.0.0.1", "include_dashboard": False, "resources": {OWNED: 1}}
    try:
        ray.init(address="local", **started, **quiet)
    finally:
        services.ConsolePopen, constants.ENABLE_RAY_CLUSTER = before
    return True


@contextmanager
def _removed_session(ray: ModuleType) -> Iterator[None]:
    """Remove the folder with the logs and sockets of the cluster that this process started, which Ray does not delete.

    The process groups of the cluster are written to it for `deleted_with_this_process`, because agents of Ray outlive a
    killed raylet by a minute.
    """
    node = ray._private.worker._global_node
    folder = Path(node.get_session_dir_path())
    for number, started in enumerate(one for kind in node.all_processes.values() for one in kind):
        (folder / f"pid-{number}").write_text(str(-started.process.pid))
    try:
        with deleted_with_this_process(folder):
            yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        latest = folder.parent / "session_latest"
        if latest.is_symlink() and not latest.exists():
            latest.unlink(missing_ok=True)
