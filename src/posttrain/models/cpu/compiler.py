"""Compiled functions: C++ for this processor, built at first use and kept in the cache directory."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from posttrain.runs.directory import cache_directory

HEADER = Path(__file__).with_name("vectors.h")
# Vectorizing a dot product requires reordering of sums. The rest of -ffast-math is left out, because it would change how
# the whole process treats denormal numbers.
FLAGS = [
    *("-O3", "-std=c++17", "-shared", "-fPIC"),
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
]
X86_FLAGS = ["-march=native", "-mprefer-vector-width=512"]
"""Every 64-bit ARM processor has the vectors that its compilers use without flags, and not all of them know these two."""
OPENMP = [] if sys.platform == "darwin" else ["-fopenmp"]
"""Apple's compiler has no OpenMP; without it, one thread computes everything."""
TYPES = {torch.float32: 0, torch.bfloat16: 1}


def compiled(name: str, source: Path, macros: Sequence[str]) -> Path | None:
    """The library of `source` for this processor. Returns None if there is no compiler, and warns if CXX names none or
    compilation fails. `POSTTRAIN_KERNEL=0` disables compiled kernels."""
    if os.environ.get("POSTTRAIN_KERNEL") == "0":
        return None
    if (command := compiler()) is None:
        if chosen := os.environ.get("CXX"):
            lost = "so no kernels are compiled and sampling is slower"
            warnings.warn(f"CXX={chosen} is not a command, {lost}; unset CXX, or install it", stacklevel=3)
        return None
    flags = [f"-I{HEADER.parent}", *FLAGS, *OPENMP, *(X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else [])]
    try:
        return build(name, source, [command, *flags, *macros], HEADER.read_text() + _processor())
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"the {name} kernel could not be compiled, so sampling is slower; {command}: {detail.strip()[:300]}; "
            "set POSTTRAIN_KERNEL=0 to disable it",
            stacklevel=3,
        )
        return None


def compiler() -> str | None:
    """The C++ compiler that CXX names, or of this machine; None if there is none."""
    if chosen := os.environ.get("CXX"):
        return shutil.which(chosen)
    return shutil.which("g++") or shutil.which("clang++")


def build(name: str, source: Path, command: list[str], depends_on: str) -> Path:
    """The library `name` that `command` compiles from `source`, from the cache if possible. `depends_on`: anything else
    that the library depends on, such as the kind of processor."""
    what = "\n".join([source.read_text(), *(part for part in command if not part.startswith("-I")), depends_on])
    digest = hashlib.blake2b(what.encode(), digest_size=8).hexdigest()
    library = cache_directory() / "kernels" / f"{name}-{digest}.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        # Compile to a temporary name and rename: another process may compile it at the same time.
        temporary = library.with_suffix(f".{os.getpid()}")
        command = [*command, "-o", str(temporary), str(source)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        temporary.rename(library)
    return library


def _processor() -> str:
    """Model and features of the processor, which `-march=native` depends on. Machines may share a cache directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        return platform.processor() or platform.machine()
