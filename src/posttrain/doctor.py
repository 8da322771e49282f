"""What bug reports need to know about this machine: versions, devices and missing extras."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from posttrain import __version__
from posttrain.plugins import missing_extras
from posttrain.runs.machine import describe_machine

VECTORS = (
    "avx2", "avx_vnni", "avx_ne_convert", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "sve", "i8mm",
    "bf16",
)  # fmt: skip
"""Processor flags that determine which kernels are used."""
VARIABLES = (
    "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY",
    "POSTTRAIN_KERNEL", "CXX", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip


def machine() -> Iterator[tuple[str, str]]:
    """Pairs of a name and a fact about this machine."""
    import torch

    from posttrain.models.cpu.compiler import compiler

    about = describe_machine()
    yield "posttrain", f"{__version__}, Python {about['python']}, {about['platform']}"
    cuda = torch.version.cuda or "not in this build"
    yield "torch", f"{torch.__version__}, CUDA {cuda}, transformers {about['packages']['transformers']}"
    yield "missing extras", ", ".join(missing_extras()) or "none"
    allowed = f"{about['cpus_allowed']} of {about['cpu_count']} logical processors may be used"
    yield "processor", f"{about['processor']}, {allowed}"
    yield "vector units", ", ".join(vector_units()) or "none known"
    driver = _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = [f"{one.name}, {one.total_memory / 2**30:.0f} GiB, sm_{one.major}{one.minor}" for one in devices]
    if torch.cuda.is_available():
        yield "GPU", "; ".join([*names, f"driver {driver or 'unknown'}"])
    else:
        yield "GPU", f"none that torch can use (NVIDIA driver {driver})" if driver else "none"
    command = compiler()
    yield "C++ compiler", f"{command} ({_first_line([command, '--version'])})" if command else "none"
    if given := [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]:
        yield "variables", " ".join(given)


def vector_units(file: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The `VECTORS` that the first processor in `file` has."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return [name for name in VECTORS if name in flags]


def _first_line(command: list[str]) -> str:
    """The first line that `command` prints; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().partition("\n")[0]
