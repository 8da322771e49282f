"""Seeds from named counters, so random numbers do not depend on the order of completion.

A name is a path such as `(run_seed, "sampling", step, group, episode, turn)`. Names are hashed with BLAKE2b, which
is stable across processes, platforms and `PYTHONHASHSEED`.
"""

import hashlib

import numpy as np


def derive_seed(*name: int | str) -> int:
    """A 63-bit seed for the named counter `name`."""
    text = "/".join(f"{type(part).__name__}:{part}" for part in name)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def random_stream(*name: int | str) -> np.random.Generator:
    """A counter-based (Philox) generator for the named counter `name`."""
    return np.random.Generator(np.random.Philox(key=derive_seed(*name)))
