"""Episodes of code that draws from the global random state of Python and numpy."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np

from posttrain.seeds import derive_seed

_lock = Lock()


class GlobalRandom:
    """Gives one episode a separate global random state, which starts from a named seed.

    Episodes in several threads exclude each other, because a process has only one global state.
    """

    def __init__(self, *name: int | str) -> None:
        """`name`: the named counter of the episode, see `posttrain.seeds`."""
        self._seed = derive_seed(*name)
        self._states: tuple[Any, Any] | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside the block, the global state is that of the episode, continued from its last use."""
        with _lock:
            before = random.getstate(), np.random.get_state()
            if self._states is None:
                random.seed(self._seed)
                np.random.seed(self._seed % 2**32)
            else:
                random.setstate(self._states[0])
                np.random.set_state(self._states[1])
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                random.setstate(before[0])
                np.random.set_state(before[1])
