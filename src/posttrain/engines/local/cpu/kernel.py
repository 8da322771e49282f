"""What sampling does between matrix products, compiled for the processor at hand where there is a C++ compiler.

Torch has no product for one query and many keys that comes near the speed of memory on a processor, and its many small
operations cost more than what they compute while few sequences run. Without a compiler torch does it all. It is built once per shape and machine, in about a second, and kept in the cache directory.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import warnings
from pathlib import Path

import torch

from posttrain.engines.local.paged_attention import PAGE
from posttrain.models.load import cache_directory

SOURCE = Path(__file__).with_name("kernel.cpp")
# Sums may be reordered, which is what vectorising a dot product takes; not the rest of -ffast-math, which would change
# how the whole process treats small numbers.
FLAGS = [
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-fassociative-math",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-mprefer-vector-width=512",
]
TYPES = {torch.float32: 0, torch.bfloat16: 1}


class DecodingKernel:
    """The compiled functions for one shape of heads."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        pointer, size, number, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
        self._attend, self._normalize, self._place = loaded.attend, loaded.normalize, loaded.place
        self._attend.argtypes = [pointer, size, *[pointer] * 4, *[size] * 3, number, threads]
        self._normalize.argtypes = [*[pointer] * 3, *[size] * 2, number, threads]
        self._place.argtypes = [*[pointer] * 5, number, *[pointer] * 3, *[size] * 3, threads]
        for function in (self._attend, self._normalize, self._place):
            function.restype = None

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Attention [B, H_kv, G, D] of `queries` [B, H_kv, G, D] over `keys` and `values` [pages, slots, H_kv, PAGE, D].

        Each row of `queries` is in one piece. `rows` [B, 5] int64: slot, slot whose first pages are read in its place,
        how many pages those are, first position that is seen, one past the last.
        """
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        self._attend(
            queries.data_ptr(),
            queries.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            rows.data_ptr(),
            len(queries),
            queries.shape[1],
            keys.shape[1],
            scaling,
            torch.get_num_threads(),
        )
        return out

    def normalize(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """weight * x / sqrt(mean(x^2) + epsilon) over the last dimension of `x` [T, size], a multiple of 32."""
        out = torch.empty_like(x)
        sizes = (*x.shape, epsilon, torch.get_num_threads())
        self._normalize(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *sizes)
        return out

    def place(
        self,
        heads: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        epsilon: float,
        cache: tuple[torch.Tensor, torch.Tensor],
        places: torch.Tensor,
    ) -> None:
        """Turn queries and keys of `heads` [T, H + 2 H_kv, D] in place, and put keys and values into the cache.

        `angles`: cosines and sines [T, D], with equal halves; `norms`: weights [D] of the norms of queries and of keys
        before that, where there are any; `cache`: keys and values [pages, slots, H_kv, PAGE, D]; `places` [T] int64:
        row of D numbers in the cache for the first key head of each token.
        """
        keyed = cache[0].shape[2]
        self._place(
            heads.data_ptr(),
            *(part.data_ptr() for part in angles),
            *(part.data_ptr() for part in norms or ()),
            *((None, None) if norms is None else ()),
            epsilon,
            *(part.data_ptr() for part in cache),
            places.data_ptr(),
            len(heads),
            heads.shape[1] - 2 * keyed,
            keyed,
            torch.get_num_threads(),
        )


@functools.lru_cache
def decoding_kernel(dtype: torch.dtype, head: int, groups: int) -> DecodingKernel | None:
    """The kernel for heads of `head` numbers, `groups` query heads to a key head; None where there is none: heads of
    other sizes than multiples of 64, other types than float32 and bfloat16, no compiler.

    A compiler that fails is warned of. `POSTTRAIN_KERNEL=0` turns the kernel off.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or dtype not in TYPES or head % 64 or os.environ.get("POSTTRAIN_KERNEL") == "0":
        return None
    macros = [f"-DTYPE_BF16={TYPES[dtype]}", f"-DHEAD={head}", f"-DGROUPS={groups}", f"-DPAGE={PAGE}"]
    try:
        return DecodingKernel(_built([compiler, *FLAGS, *macros]))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"the decoding kernel could not be built, so decoding is slower; {compiler} says: {detail.strip()[:300]}; "
            "POSTTRAIN_KERNEL=0 turns it off",
            stacklevel=2,
        )
        return None


def _built(command: list[str]) -> Path:
    """The library that `command` makes of the source on this kind of processor, made unless it is there."""
    what = "\n".join([SOURCE.read_text(), *command, _processor()])
    name = hashlib.blake2b(what.encode(), digest_size=8).hexdigest()
    library = cache_directory() / "kernels" / f"decoding-{name}.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and renamed: another process may be at it too.
        aside = library.with_suffix(f".{os.getpid()}")
        built = [*command, "-o", str(aside), str(SOURCE)]
        subprocess.run(built, check=True, capture_output=True, text=True, timeout=120)
        aside.rename(library)
    return library


def _processor() -> str:
    """What `-march=native` depends on: a cache directory may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        return platform.processor() or platform.machine()
