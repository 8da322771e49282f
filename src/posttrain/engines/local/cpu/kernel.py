"""Sampling on a CPU: a compiled kernel for the operations between matrix products, and the compiler.

torch has no product of one query with many keys that comes near memory bandwidth on a CPU, and with few sequences the
overhead of its many small operations exceeds their computation. The kernel (`kernel.cpp`) replaces them if there is a
C++ compiler; otherwise torch computes everything. It is built once per shape and machine, in about a second, and kept
in the cache directory.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from posttrain.runs.directory import cache_directory

PAGE = 128
"""Tokens per page of the key/value cache. Every product reads complete pages, so on average half of a sequence's last
page is read unnecessarily.
"""
SOURCE = Path(__file__).with_name("kernel.cpp")
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


# -- the compiled kernel ----------------------------------------------------------------------------------------------


def named(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Record calls as `kernel NAME` by torch's profiler, in which ctypes calls would otherwise have no name."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*arguments: Any) -> Any:
            if not torch.autograd.profiler._is_profiler_enabled:
                return method(*arguments)
            with torch.autograd.profiler.record_function(f"kernel {name}"):
                return method(*arguments)

        return call

    return decorate


class DecodingKernel:
    """The compiled functions for one head size, group size and dtype."""

    def __init__(self, library: Path) -> None:
        loaded = self.library = ctypes.CDLL(str(library))
        pointer, size, number, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
        self._attend, self._normalize, self._store = loaded.attend, loaded.normalize, loaded.rotate_and_store
        self._attend.argtypes = [pointer, size, *[pointer] * 4, *[size] * 3, number, threads]
        self._normalize.argtypes = [*[pointer] * 3, *[size] * 2, number, threads]
        self._store.argtypes = [*[pointer] * 5, number, *[pointer] * 3, *[size] * 3, threads]
        for function in (self._attend, self._normalize, self._store):
            function.restype = None

    @named("attend")
    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Attention [B, H_kv, G, D] of `queries` [B, H_kv, G, D] over `keys` and `values` [pages, slots, H_kv, PAGE,
        D].

        Each row of `queries` is contiguous. `rows` [B, 5] int64: slot, slot whose first pages are read instead, number
        of those pages, first visible position, one past the last.
        """
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        pointers = (part.data_ptr() for part in (keys, values, out, rows))
        sizes = (len(queries), queries.shape[1], keys.shape[1])
        threads = torch.get_num_threads()
        self._attend(queries.data_ptr(), queries.stride(0), *pointers, *sizes, scaling, threads)
        return out

    @named("normalize")
    def normalize(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """weight * x / sqrt(mean(x^2) + epsilon) over the last dimension of `x` [T, size], a multiple of 32."""
        out = torch.empty_like(x)
        sizes = (*x.shape, epsilon, torch.get_num_threads())
        self._normalize(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *sizes)
        return out

    @named("rotate_and_store")
    def rotate_and_store(
        self,
        heads: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        epsilon: float,
        cache: tuple[torch.Tensor, torch.Tensor],
        rows: torch.Tensor,
    ) -> None:
        """Normalize and rotate the queries and keys of `heads` in place, and store keys and values in the cache.

        `heads` [T, H + 2 H_kv, D]: queries, keys and values. `angles`: cosines and sines [T, D] with equal halves.
        `norms`: weights [D] of the norms of queries and keys, if the model has them. `cache`: keys and values [pages,
        slots, H_kv, PAGE, D]. `rows` [T] int64: index of the cache row (of D numbers) for each token's first key head.
        """
        kv_heads = cache[0].shape[2]
        self._store(
            heads.data_ptr(),
            *(part.data_ptr() for part in angles),
            *(part.data_ptr() for part in norms or ()),
            *((None, None) if norms is None else ()),
            epsilon,
            *(part.data_ptr() for part in cache),
            rows.data_ptr(),
            len(heads),
            heads.shape[1] - 2 * kv_heads,
            kv_heads,
            torch.get_num_threads(),
        )


@functools.lru_cache
def decoding_kernel(dtype: torch.dtype, head: int, groups: int) -> DecodingKernel | None:
    """The kernel for heads of size `head` with `groups` query heads per key head.

    Returns None if `head` is not a multiple of 32, the dtype is neither float32 nor bfloat16, or it cannot be compiled.
    """
    if dtype not in TYPES or head % 32:
        return None
    macros = [f"-DTYPE_BF16={TYPES[dtype]}", f"-DHEAD={head}", f"-DGROUPS={groups}", f"-DPAGE={PAGE}"]
    library = compiled("decoding", SOURCE, macros)
    return None if library is None else DecodingKernel(library)


# -- compilation ------------------------------------------------------------------------------------------------------


def compiled(name: str, source: Path, macros: Sequence[str]) -> Path | None:
    """The library of `source` for this processor.

    Returns None if there is no compiler, and warns if CXX names none or compilation fails. `POSTTRAIN_KERNEL=0` disables
    compiled kernels.
    """
    if os.environ.get("POSTTRAIN_KERNEL") == "0":
        return None
    command = compiler()
    if command is None:
        if chosen := os.environ.get("CXX"):
            warnings.warn(
                f"CXX={chosen} is not a command, so no kernels are compiled and sampling is slower; unset CXX, or install it",
                stacklevel=3,
            )
        return None
    flags = [*FLAGS, *OPENMP, *(X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else [])]
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
    """The library `name` that `command` compiles from `source`, from the cache if possible.

    `depends_on`: anything else that the library depends on, such as the kind of processor.
    """
    what = "\n".join([source.read_text(), *command, depends_on])
    digest = hashlib.blake2b(what.encode(), digest_size=8).hexdigest()
    library = cache_directory() / "kernels" / f"{name}-{digest}.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        # Compile to a temporary name and rename: another process may compile it at the same time.
        temporary = library.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [*command, "-o", str(temporary), str(source)], check=True, capture_output=True, text=True, timeout=120
        )
        temporary.rename(library)
    return library


def _processor() -> str:
    """Model and features of the processor, which `-march=native` depends on. Machines may share a cache directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        return platform.processor() or platform.machine()
