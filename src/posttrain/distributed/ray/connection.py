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
from posttrain.recipe.hardware import HardwareRecipe

OWNED = "posttrain_run"
"""Resource that marks a cluster started by a run, so that other runs do not use it."""
_CONNECT_SECONDS = 10.0
"""Maximum wait for a cluster address, in seconds. Ray itself would try for minutes and print a line per second."""


def load_ray() -> ModuleType:
    """The module ray. InputError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return require_module("ray", "hardware.ray")


@contextmanager
def connected(address: str, hardware: HardwareRecipe) -> Iterator[Any]:
    """Connect this process to the cluster at `address` inside the block; yields the module ray.

    `auto` uses the cluster that runs on this machine, or starts one that ends with the block. A cluster that another
    run started is not used, because it ends with that run. A process that is already connected stays connected.
    """
    ray = load_ray()
    if ray.is_initialized():
        yield ray
        return
    started = False
    try:
        started = _connect(ray, address)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        cause = " ".join(str(error).split())
        raise (InputError if address != "auto" else RunError)(
            f"hardware.ray: no cluster at {address} ({cause}); start one with `ray start --head`, or set its address"
        ) from error
    files = _session_folder(ray) if started else None
    try:
        with deleted_with_this_process(files) if files is not None else nullcontext():
            yield ray
    finally:
        ray.shutdown()
        if files is not None:
            _remove_session(files)


def _connect(ray: ModuleType, address: str) -> bool:
    """Connect this process; returns whether a cluster was started for it."""
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": True}
    if address != "auto":
        _check_reachable(address)
        ray.init(address=address, **quiet)
        return False
    try:
        ray.init(address="auto", **quiet)
        if OWNED not in ray.cluster_resources():
            return False
        ray.shutdown()
    except ConnectionError:
        pass  # no cluster runs on this machine
    with _own_process_groups():
        ray.init(address="local", include_dashboard=False, resources={OWNED: 1}, **quiet)
    return True


@contextmanager
def _own_process_groups() -> Iterator[None]:
    """Inside the block, Ray starts its processes in separate process groups.

    Otherwise a signal to the group of this process, for example from `timeout` or a batch system, would end the cluster
    before the learners have saved a checkpoint.
    """
    services: Any = importlib.import_module("ray._private.services")
    before = services.ConsolePopen
    services.ConsolePopen = partial(before, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = before


def _check_reachable(address: str) -> None:
    """OSError if nothing listens at `host:port` or `ray://host:port`. Other forms of addresses are left to Ray."""
    match = re.fullmatch(r"(?:ray://)?\[?([^\[\]/]+?)\]?:(\d+)", address)
    if match is not None:
        socket.create_connection((match[1], int(match[2])), _CONNECT_SECONDS).close()


def _session_folder(ray: ModuleType) -> Path | None:
    """Ray's folder with the logs and sockets of the cluster that this process started.

    The process groups of the cluster are written to it for `deleted_with_this_process`, because agents of Ray outlive a
    killed raylet by a minute.
    """
    node = getattr(ray._private.worker, "_global_node", None)
    if node is None:
        return None
    folder = Path(node.get_session_dir_path())
    for number, started in enumerate(one for kind in node.all_processes.values() for one in kind):
        (folder / f"pid-{number}").write_text(str(-started.process.pid))
    return folder


def _remove_session(folder: Path) -> None:
    """Remove the files of a cluster that ended with its run, which Ray does not delete."""
    shutil.rmtree(folder, ignore_errors=True)
    latest = folder.parent / "session_latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink(missing_ok=True)
