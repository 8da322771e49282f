"""Sampling on a CPU: a compiled kernel for the operations between matrix products.

torch has no product of one query with many keys that comes near memory bandwidth on a CPU, and with few sequences the
overhead of its many small operations exceeds their computation. The kernel (`kernel.cpp`) replaces them if there is a
C++ compiler; otherwise torch computes everything. It is built once per shape and machine, in about a second, and kept
in the cache directory.
"""

import ctypes
import functools
from pathlib import Path

import torch

from posttrain.models.cpu.compiler import TYPES, compiled

PAGE = 128
"""Tokens per page of the key/value cache. Every product reads complete pages, so on average half of a sequence's last
page is read unnecessarily."""
SOURCE = Path(__file__).with_name("kernel.cpp")


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

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Attention [B, H_kv, G, D] of `queries` [B, H_kv, G, D] over `keys` and `values` [pages, slots, H_kv, PAGE,
        D]. Each row of `queries` is contiguous. `rows` [B, 5] int64: slot, slot whose first pages are read instead,
        number of those pages, first visible position, one past the last."""
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        pointers = (part.data_ptr() for part in (keys, values, out, rows))
        sizes = (len(queries), queries.shape[1], keys.shape[1])
        threads = torch.get_num_threads()
        self._attend(queries.data_ptr(), queries.stride(0), *pointers, *sizes, scaling, threads)
        return out

    def normalize(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """weight * x / sqrt(mean(x^2) + epsilon) over the last dimension of `x` [T, size], a multiple of 32."""
        out = torch.empty_like(x)
        sizes = (*x.shape, epsilon, torch.get_num_threads())
        self._normalize(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *sizes)
        return out

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
    """The kernel for heads of size `head` with `groups` query heads per key head. Returns None if `head` is not a
    multiple of 32, the dtype is neither float32 nor bfloat16, or it cannot be compiled."""
    if dtype not in TYPES or head % 32:
        return None
    macros = [f"-DTYPE_BF16={TYPES[dtype]}", f"-DHEAD={head}", f"-DGROUPS={groups}", f"-DPAGE={PAGE}"]
    library = compiled("decoding", SOURCE, macros)
    return None if library is None else DecodingKernel(library)
