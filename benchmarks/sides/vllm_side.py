"""Where vLLM is, and the settings with which it is at its best on a CPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from sides.process import Worker

ABSENT = (
    "vLLM is left out: no interpreter that is known here has it; install it with `make vllm`, or name its interpreter with "
    "--vllm-python or POSTTRAIN_VLLM_PYTHON"
)
MADE = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
"""The interpreter of `make vllm`."""


def find_python(given: str | None) -> str | None:
    """The interpreter that has vLLM: the one given, that of the environment, this one, or `MADE`; None where there is none."""
    named = given or os.environ.get("POSTTRAIN_VLLM_PYTHON")
    if named is None and importlib.util.find_spec("vllm"):
        return sys.executable
    named = named or str(MADE)
    if not Path(named).is_file():
        return None
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return named if subprocess.run([named, "-c", code], check=False).returncode == 0 else None


def start(
    python: str, model: str, dtype: str, threads: int, in_flight: int, longest: int, eager: bool = True
) -> Worker:
    """vLLM with weights of `dtype`, for up to `in_flight` requests of up to `longest` tokens each.

    Set beyond its defaults: every processor computes and none is reserved, pages are as small as its kernels like, so
    that prompts of a hundred tokens are shared, the two libraries it asks for are preloaded where they lie in the
    environment's `lib`, and answers are not turned into text. Without `eager` the model is compiled first.
    """
    library = Path(python).parent.parent / "lib"
    preloaded = [library / name for name in ("libtcmalloc_minimal.so.4", "libiomp5.so")]
    settings: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "enforce_eager": eager,
        "max_model_len": longest,
        "max_num_seqs": in_flight,
        "max_num_batched_tokens": 2048,
        "block_size": 32,
    }
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])),
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": ":".join(str(file) for file in preloaded if file.exists()),
    }
    return Worker("sides.vllm_worker", settings, threads, python, environment)
