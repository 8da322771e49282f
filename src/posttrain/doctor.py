"""Facts about this machine, the defaults that posttrain selects on it, possible speed-ups, and a measured speed."""

import math
import os
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from posttrain import SPIN_COUNT
from posttrain.episode import Advantages, Episode
from posttrain.errors import PosttrainError, RunError
from posttrain.recipe.pipeline import load_pipeline
from posttrain.recipe.rl import RlRecipe
from posttrain.runs.directory import describe_machine

T = TypeVar("T")

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
DEMO_LAKE: dict[str, Any] = {"slippery": False, "observation": "local", "max_turns": 6}
DEMO_TOKENS, DEMO_TURNS = 6_700, 2.5
"""Tokens of its warm-up, less a quarter because SFT has no forward pass for old log-probabilities, and turns of an episode."""
TURNS, GROUP = DEMO_LAKE["max_turns"], 8
MANY, FEW = (32, TURNS), (16, 2)
"""Measured episodes in flight and their turns: on fast and on slow machines. On a Zen 3, both gave the same processor
time per turn within 7%, because the longer contexts of later turns offset the larger products."""


@dataclass(frozen=True)
class Speed:
    """A measurement of sampling and training on the demo's task."""

    dtype: str
    threads: int
    in_flight: int
    """Episodes that were sampled at a time."""
    turns: int
    """Turns of these episodes. Rates are for episodes of `TURNS` turns; with fewer, they are extrapolated."""
    episodes: float
    """Sampled episodes per second."""
    tokens: float
    """Tokens per second of an update in which every sampled token has credit."""
    updated: float
    """Episodes per second of that update."""

    def demo_minutes(self) -> float:
        """Estimated duration of `demo/pipeline` in minutes, excluding the loading of models."""
        rl = load_pipeline("demo/pipeline", []).stages[-1].recipe
        assert isinstance(rl, RlRecipe)
        assert rl.max_minutes is not None
        share = DEMO_TURNS / TURNS
        evaluated = share * 2 * sum(len(some.of_generated(key)) for key, some in rl.evaluation.ranges.items())
        trained = share * rl.steps * rl.rollout.groups_per_step * rl.rollout.episodes_per_group
        learning = trained * (1 / self.episodes + 1 / self.updated) / 60
        return DEMO_TOKENS / self.tokens / 60 + evaluated / self.episodes / 60 + min(learning, rl.max_minutes)


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


def measure(model: str = DEMO_MODEL, seconds: float = 5.0) -> Speed:
    """Sample and train on the demo's task for about `seconds` each, with the threads that a run would use.

    A slow machine takes longer than `seconds`: the least work is two turns of 16 episodes, and two updates on two of
    them.

    Raises:
        InputError: the model is not installed.
        RunError: the optimizer skipped an update, whose time would be meaningless.
    """
    import torch

    from posttrain.models.cpu.threads import busy_processors, threads_beside
    from posttrain.models.load import resolve_device

    every = torch.get_num_threads()
    try:
        if resolve_device("auto").type == "cpu":
            torch.set_num_threads(threads_beside(busy_processors()) or every)
        return _measured(model, seconds)
    finally:
        torch.set_num_threads(every)


def _measured(model: str, seconds: float) -> Speed:
    import torch

    import posttrain

    policy = posttrain.Policy(model, dtype="auto")
    engine = posttrain.LocalEngine(policy)
    learner = posttrain.Learner(policy, learning_rate=1e-9)

    def play(episodes: int, turns: int, step: int) -> list[Episode]:
        lake = posttrain.make_env("frozen_lake", **DEMO_LAKE | {"max_turns": turns})
        tasks, group = range(max(1, episodes // GROUP)), min(episodes, GROUP)
        return posttrain.rollout(
            engine, lake, tasks, episodes_per_group=group, max_tokens=12, tokens_per_episode=600, step=step
        )

    def update(episodes: list[Episode]) -> None:
        metrics = learner.update(episodes, every_token(episodes))
        if metrics["optimizer/skipped"] or "optimizer/no_signal" in metrics:
            raise RunError(f"the optimizer skipped the measured update ({metrics}); report this output as a bug")

    play(2, 1, 0)  # compiles the kernel and allocates the cache
    size = FEW
    played, sampling = timed(lambda step: play(*size, step), 0)
    if sampling * math.prod(MANY) / math.prod(FEW) <= seconds:
        size = MANY
        played, sampling = timed(lambda step: play(*size, step), seconds)
    batch = played[-1][:2]
    update(batch)  # allocates the optimizer's state
    updates, updating = timed(lambda _: update(batch), 0)
    if updating < seconds:
        batch = played[-1][: max(2, int(2 * seconds / updating))]
        updates, updating = timed(lambda _: update(batch), seconds)
    return Speed(
        str(next(policy.model.parameters()).dtype).removeprefix("torch."),
        torch.get_num_threads(),
        *size,
        episodes=sum(map(_whole_episodes, played)) / sampling,
        tokens=computed_tokens(batch) * len(updates) / updating,
        updated=_whole_episodes(batch) * len(updates) / updating,
    )


def every_token(episodes: list[Episode]) -> Advantages:
    """Credit for every sampled token. The optimizer skips tokens without credit, which would look like a fast update.

    Untrained models have nearly equal returns, so their advantages are 0.
    """
    return Advantages([[stream.sampled.astype(np.float32) for stream in episode.streams] for episode in episodes])


def computed_tokens(episodes: list[Episode]) -> int:
    """Tokens of an update on `episodes`: those that the episodes of a group share are computed once."""
    from posttrain.models.packing import row_length

    return sum(
        row_length([stream.ids for episode in episodes if episode.group == group for stream in episode.streams])
        for group in {episode.group for episode in episodes}
    )


def _whole_episodes(episodes: list[Episode]) -> float:
    return sum(len(episode.turns) for episode in episodes) / TURNS


def timed(work: Callable[[int], T], seconds: float) -> tuple[list[T], float]:
    """The results of `work(1)`, `work(2)`, ... until `seconds` have passed, at least one, and the elapsed seconds."""
    began = time.perf_counter()
    results = [work(1)]
    while time.perf_counter() - began < seconds:
        results.append(work(len(results) + 1))
    return results, time.perf_counter() - began


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
    threads = f"{found.threads} thread{'s' * (found.threads != 1)}"
    basis = "" if found.turns == TURNS else f", extrapolated from episodes of {found.turns} turns"
    return [
        f"{DEMO_MODEL} in {found.dtype} with {threads}: {found.episodes:.2g} episodes of FrozenLake with {TURNS} turns "
        f"sampled per second with {found.in_flight} in flight{basis}; updates at {found.tokens:,.0f} tokens per second",
        f"expected time of `posttrain pipeline demo/pipeline`: about {found.demo_minutes():.0f} minutes at this speed",
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
