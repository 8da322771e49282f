"""What is specific to NVIDIA GPUs."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@cache
def triton_kernels(name: str) -> Any:
    """The module `name` of this package, which needs Triton; None without it."""
    return import_module(f"{__name__}.{name}") if find_spec("triton") else None
