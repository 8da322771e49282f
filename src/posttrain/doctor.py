"""Facts about this machine, the defaults that posttrain selects on it, and possible speed-ups."""

import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

from posttrain import SPIN_COUNT
from posttrain.plugins import missing_extras
from posttrain.runs.machine import describe_machine

VECTORS = (
    "avx2",
    "avx_vnni",
    "avx_ne_convert",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "sve",
    "i8mm",
    "bf16",
)
"""Processor flags that determine which kernels are used."""
VARIABLES = (
    "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY",
    "POSTTRAIN_KERNEL", "CXX", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
_DEMO_HEADS = 64, 3
"""Head size and query heads per key head of the demo's model."""


def machine() -> Iterator[tuple[str, str]]:
    """Pairs of a name and a fact about this machine."""
    import torch

    from posttrain.engines.local.cpu.kernel import compiler
    from posttrain.models.cpu.threads import busy_processors

    about = describe_machine()
    packages = about["packages"]
    yield "posttrain", f"{_version()}, Python {about['python']}, {about['platform']}"
    yield (
        "torch",
        f"{torch.__version__}, CUDA {torch.version.cuda or 'not in this build'}, transformers {packages['transformers']}",
    )
    yield "missing extras", ", ".join(missing_extras()) or "none"
    yield (
        "processor",
        f"{about['processor']}, {about['cpus_allowed']} of {about['cpu_count']} logical processors may be used",
    )
    yield "vector units", ", ".join(vector_units()) or "none known"
    total, free = memory()
    if total:
        yield "memory", f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"
    yield "other busy threads", f"{busy_processors():.0f}"
    yield "GPU", _gpus()
    command = compiler()
    yield "C++ compiler", f"{command} ({_first_line([command, '--version'])})" if command else "none"
    if given := [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]:
        default = f"GOMP_SPINCOUNT={SPIN_COUNT}"
        yield "variables", " ".join(f"{one} (posttrain's default)" if one == default else one for one in given)


def choices() -> Iterator[tuple[str, str]]:
    """Pairs of a name and what posttrain selects on this machine by default."""
    import torch

    from posttrain.engines.local.cpu.kernel import decoding_kernel
    from posttrain.engines.local.cpu.layers import product_library
    from posttrain.models.cpu.backend import prefers_onednn
    from posttrain.models.load import has_bfloat16, resolve_device, resolve_dtype

    device = resolve_device("auto")
    yield "model.device", str(device)
    names = [str(resolve_dtype(dtype, device)).removeprefix("torch.") for dtype in (None, "auto")]
    demo = resolve_dtype("auto", device)
    native = "has" if has_bfloat16(device) else "has no"
    yield "model.dtype", f"{names[0]}; {names[1]} with `auto` (the device {native} bfloat16 instructions)"
    if device.type == "cpu":
        yield "threads", f"{torch.get_num_threads()}; fewer if other processes are busy and fewer are faster"
        yield (
            "float32 products",
            "oneDNN" if prefers_onednn() else "MKL" if torch.backends.mkl.is_available() else "torch",
        )
        if not decoding_kernel(demo, *_DEMO_HEADS):
            kernels = "attention by torch, since no kernel could be compiled"
        elif product_library(demo):
            kernels = "attention and products by compiled kernels"
        else:
            kernels = "attention by a compiled kernel"
        yield "engine", f"local; {kernels}"
        yield "training attention", "one product per sequence and prefix, in blocks"
        return
    yield "engine", "local; `engine.type: vllm` if vllm is installed"
    yield "attention", "variable-length flash kernel where the GPU and the head size allow it, else torch"


def remedies() -> Iterator[str]:
    """Sentences about what would make this machine faster."""
    import torch

    from posttrain.engines.local.cpu.kernel import compiler
    from posttrain.models.cpu.threads import busy_processors, usable_processors
    from posttrain.models.load import has_bfloat16, resolve_device
    from posttrain.training.stage import unused_gpu

    device = resolve_device("auto")
    yield from unused_gpu("auto")
    if device.type == "cpu":
        allowed = usable_processors()
        if has_bfloat16(device):
            yield "set model.dtype=auto for bfloat16, which this processor computes about twice as fast as float32"
        if compiler() is None and not os.environ.get("CXX"):  # `compiled` warns if CXX names none
            yield "install a C++ compiler (g++ or clang++) for the decoding kernel"
        if os.environ.get("POSTTRAIN_KERNEL") == "0":
            yield "unset POSTTRAIN_KERNEL to use the decoding kernel"
        if "OMP_NUM_THREADS" in os.environ and torch.get_num_threads() < allowed:
            yield f"unset OMP_NUM_THREADS to use {allowed} processors instead of {torch.get_num_threads()}"
        if os.environ.get("OMP_WAIT_POLICY"):
            yield "unset OMP_WAIT_POLICY: its values are slower beside other processes (active) or alone (passive)"
        best = {"DEFAULT": "avx2", "AVX2": "avx512f"}.get(torch.backends.cpu.get_cpu_capability())
        if os.environ.get("ATEN_CPU_CAPABILITY") and best in vector_units():
            yield f"unset ATEN_CPU_CAPABILITY: torch and posttrain's compiled products do without {best} because of it"
    if busy_processors() >= 1:
        yield "end other busy processes; `top` lists them"
    total, free = memory()
    if total and free < 3 * 2**30:
        yield f"free memory: {free / 2**30:.1f} GiB are left, and the demo needs about 3 GiB"


def report() -> Iterator[str]:
    """Yield the lines of `posttrain doctor` as soon as they are available."""
    yield from ("Machine", *_lines(machine()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chosen = _lines(choices())
    yield from ("", "posttrain selects", *chosen, "", "Faster")
    sentences = dict.fromkeys([*remedies(), *(str(warning.message) for warning in caught)])
    yield from [f"  - {sentence}" for sentence in sentences] or ["  no suggestions"]


def _lines(pairs: Iterator[tuple[str, str]]) -> list[str]:
    found = list(pairs)
    width = max(len(name) for name, _ in found)
    return [f"  {name:<{width}}  {value}" for name, value in found]


def vector_units(file: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The `VECTORS` that the first processor in `file` has."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return [name for name in VECTORS if name in flags]


def memory(file: Path = Path("/proc/meminfo")) -> tuple[int, int]:
    """Total and available bytes of memory; 0 if unknown."""
    try:
        lines = file.read_text().splitlines()
        sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    except (OSError, ValueError, IndexError):
        return 0, 0
    return sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)


def _gpus() -> str:
    import torch

    driver = _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    if not torch.cuda.is_available():
        return f"none that torch can use (NVIDIA driver {driver})" if driver else "none"
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = [f"{one.name}, {one.total_memory / 2**30:.0f} GiB, sm_{one.major}{one.minor}" for one in found]
    return "; ".join(names) + f"; driver {driver or 'unknown'}"


def _first_line(command: list[str]) -> str:
    """The first line that `command` prints; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().partition("\n")[0]


def _version() -> str:
    from posttrain import __version__

    return __version__
