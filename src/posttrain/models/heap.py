"""Freed memory that stays with the process, for work that takes and frees the same gigabytes over and over."""

import ctypes
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt` in the GNU C library."""
LARGEST_FROM_HEAP = 32 << 20
"""Bytes: the most that the library allows; larger blocks always go back to the system."""


def keep_freed_memory() -> None:
    """From here on, blocks of up to 32 MiB come from the heap, and what is freed of the heap stays there.

    Otherwise the activations of a training step go back to the system at its end, and are handed out page by page,
    each cleared first, in the next one: on a CPU that was a tenth of the step. The most memory that is ever in use is
    the same. Does nothing where the C library is not GNU's.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGEST_FROM_HEAP)
        mallopt(TRIM_THRESHOLD, -1)
