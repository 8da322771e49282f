"""Connecting to a Ray cluster, or starting one on this machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from posttrain.errors import InputError, RunError
from posttrain.recipe.hardware import HardwareRecipe


def load_ray() -> ModuleType:
    """The package; `InputError` where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise InputError(
            "hardware.ray needs the package ray; install it with `pip install 'posttrain[ray]'`, or leave hardware.ray out"
        ) from error
    return ray


@contextmanager
def connected(address: str, hardware: HardwareRecipe) -> Iterator[Any]:
    """Inside, this process is connected to the cluster at `address`, and gets the package ray.

    `auto`: the cluster of this machine where one runs, else one that is started here and ends with the block. A process
    that is connected already stays so.
    """
    ray = load_ray()
    if ray.is_initialized():
        yield ray
        return
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": True}
    try:
        try:
            ray.init(address=address, **quiet)
        except ConnectionError:
            if address != "auto":
                raise
            ray.init(include_dashboard=False, **quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        said = " ".join(str(error).split())
        raise (InputError if address != "auto" else RunError)(
            f"hardware.ray: {address} gave no cluster ({said}); start one with `ray start --head`, or give its address"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()
