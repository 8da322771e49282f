"""Facts about this machine, the defaults that posttrain selects on it, possible speed-ups, and a measured speed."""

import os
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain import SPIN_COUNT
from posttrain.errors import PosttrainError
from posttrain.runs.directory import describe_machine

if TYPE_CHECKING:
    from posttrain.recipe.rl import RlRecipe
    from posttrain.training.speed import Speed

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
DEMO_MODEL = "packaged:smollm2-135m"
DEMO_HEADS = 64, 3
"""Its head size and query heads per key head. The measurement uses the kernel of these sizes."""
DEMO_WARM_UP, DEMO_EVALUATED = 9_800, 528
"""Amounts of work in `demo/pipeline` besides its RL steps: tokens of its warm-up, episodes of its other evaluations."""


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
    from posttrain.engines.local.cpu.linear import product_library
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
        if not decoding_kernel(demo, *DEMO_HEADS):
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
        yield f"end other busy processes: {', '.join(busy_processes()[:5]) or '`top` lists them'}"
    total, free = memory()
    if total and free < 3 * 2**30:
        yield f"free memory: {free / 2**30:.1f} GiB are left, and the demo needs about 3 GiB"


def demo_recipe(model: str = DEMO_MODEL) -> "RlRecipe":
    """The recipe of the demo's RL stage, starting from `model`."""
    from posttrain.recipe.catalogue import shipped
    from posttrain.recipe.pipeline import load_pipeline
    from posttrain.recipe.rl import RlRecipe

    pipeline = load_pipeline(f"{shipped('recipes')}/demo/pipeline.yaml", [])
    recipe = pipeline.stages[-1].recipe
    assert isinstance(recipe, RlRecipe)
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": model})})


def measure(model: str = DEMO_MODEL, seconds: float = 5.0) -> "Speed":
    """Sample and train on the demo's task for about `seconds` each, with the threads that a run would use.

    Raises:
        InputError: the model is not installed.
    """
    import torch

    from posttrain.models.cpu.threads import busy_processors, threads_beside
    from posttrain.models.load import resolve_device
    from posttrain.training.speed import measure_run

    every = torch.get_num_threads()
    try:
        if resolve_device("auto").type == "cpu":
            torch.set_num_threads(threads_beside(busy_processors()) or every)
        return measure_run(demo_recipe(model), seconds)
    finally:
        torch.set_num_threads(every)


def demo_minutes(speed: "Speed") -> float:
    """Estimated duration of `demo/pipeline` in minutes, excluding the loading of models."""
    from posttrain.training.speed import steps_that_fit

    _, learning = steps_that_fit(demo_recipe(), speed)
    return (DEMO_WARM_UP / speed.tokens + speed.sampling.seconds(DEMO_EVALUATED) + learning) / 60


def report(speed: bool = True, announce: Callable[[str], None] = lambda _: None) -> Iterator[str]:
    """Yield the lines of `posttrain doctor` as soon as they are available.

    `announce` is called with a line about the measurement before it starts.
    """
    yield from ("Machine", *_lines(machine()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chosen = _lines(choices())
    yield from ("", "posttrain selects", *chosen, "", "Faster")
    sentences = dict.fromkeys([*remedies(), *(str(warning.message) for warning in caught)])
    yield from [f"  - {sentence}" for sentence in sentences] or ["  no suggestions"]
    if speed:
        yield from ("", "Speed")
        announce("  measuring for about 10 seconds after loading the model, longer on a slow machine ...")
        yield from (f"  {line}" for line in _speed_lines())


def _speed_lines() -> list[str]:
    try:
        found = measure()
    except PosttrainError as error:
        return [f"not measured: {error}"]
    rate = found.in_flight / found.sampling.seconds(found.in_flight)
    threads = f"{found.threads} thread{'s' * (found.threads != 1)}"
    return [
        f"{DEMO_MODEL} in {found.dtype} with {threads}: {rate:.2g} episodes of FrozenLake with {found.turns:.1f} turns "
        f"sampled per second with {found.in_flight} in flight; updates at {found.tokens:,.0f} tokens per second",
        f"expected time of `posttrain pipeline demo/pipeline`: about {demo_minutes(found):.0f} minutes at this speed",
    ]


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


def busy_processes(folder: Path = Path("/proc"), seconds: float = 0.3) -> list[str]:
    """Names and ids of other processes that use a tenth of a processor or more, the busiest first. Empty if unknown."""
    before = _processor_seconds(folder)
    time.sleep(seconds)
    used = {key: now - before.get(key, now) for key, now in _processor_seconds(folder).items()}
    ranked = sorted((key for key in used if used[key] >= seconds / 10), key=lambda key: -used[key])
    return [f"{name} ({pid})" for pid, name in ranked if pid != os.getpid()]


def _processor_seconds(folder: Path) -> dict[tuple[int, str], float]:
    """Processor time by id and name of the processes in `folder`, such as `/proc`."""
    found = {}
    for file in folder.glob("[0-9]*/stat"):
        try:
            name, _, numbers = file.read_text().partition("(")[2].rpartition(")")
            user, system = numbers.split()[11:13]
        except (OSError, ValueError):  # the process has ended
            continue
        found[int(file.parent.name), name] = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return found


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
