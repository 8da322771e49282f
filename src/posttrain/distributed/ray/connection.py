"""Connecting to a Ray cluster, or starting one on this machine."""

import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.errors import InputError, RunError
from posttrain.plugins import require_module
from posttrain.recipe.hardware import HardwareRecipe

OWNED = "posttrain_run"
"""Resource of a cluster that a run started for itself, by which others leave it alone."""
_ANSWER_SECONDS = 10.0
"""Longest wait for a machine that is said to have a cluster; Ray itself tries for minutes, with a line a second."""


def load_ray() -> ModuleType:
    """The package; `InputError` where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return require_module("ray", "hardware.ray")


@contextmanager
def connected(address: str, hardware: HardwareRecipe) -> Iterator[Any]:
    """Inside, this process is connected to the cluster at `address`, and gets the package ray.

    `auto`: the cluster of this machine where one runs, else one that is started here and ends with the block; one that
    another run started for itself would end with that and is left alone. A process that is connected already stays so.
    """
    ray = load_ray()
    if ray.is_initialized():
        yield ray
        return
    started = False
    try:
        started = _connect(ray, address)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        said = " ".join(str(error).split())
        raise (InputError if address != "auto" else RunError)(
            f"hardware.ray: {address} gave no cluster ({said}); start one with `ray start --head`, or give its address"
        ) from error
    files = _session_folder(ray) if started else None
    try:
        yield ray
    finally:
        ray.shutdown()
        if files is not None:
            _remove_session(files)


def _connect(ray: ModuleType, address: str) -> bool:
    """Connect this process; returns whether that started a cluster."""
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": True}
    if address != "auto":
        _answers(address)
        ray.init(address=address, **quiet)
        return False
    try:
        ray.init(address="auto", **quiet)
        if OWNED not in ray.cluster_resources():
            return False
        ray.shutdown()
    except ConnectionError:
        pass  # none runs here
    ray.init(address="local", include_dashboard=False, resources={OWNED: 1}, **quiet)
    return True


def _answers(address: str) -> None:
    """OSError where nobody listens at `host:port` or `ray://host:port`; any other address is left to Ray."""
    found = re.fullmatch(r"(?:ray://)?\[?([^\[\]/]+?)\]?:(\d+)", address)
    if found is not None:
        socket.create_connection((found[1], int(found[2])), _ANSWER_SECONDS).close()


def _session_folder(ray: ModuleType) -> Path | None:
    """Where Ray keeps logs and sockets of the cluster that this process started."""
    node = getattr(ray._private.worker, "_global_node", None)
    return None if node is None else Path(node.get_session_dir_path())


def _remove_session(folder: Path) -> None:
    """Ray leaves its files behind; those of a cluster that ended with its run are of use to nobody."""
    shutil.rmtree(folder, ignore_errors=True)
    latest = folder.parent / "session_latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink(missing_ok=True)
