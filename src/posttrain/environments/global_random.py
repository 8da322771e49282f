"""Episodes of code that draws from the global random state of Python and numpy."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

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
        self._states: tuple[object, object] | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside the block, the global state is that of the episode, continued from its last use."""
        with _lock:
            before = random.getstate(), np.random.get_state()
            if self._states is None:
                random.seed(self._seed)
                np.random.seed(self._seed % 2**32)
            else:
                _set(self._states)
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                _set(before)


def _set(states: tuple[object, object]) -> None:
    python, of_numpy = states
    random.setstate(python)  # type: ignore[arg-type]
    np.random.set_state(of_numpy)  # type: ignore[arg-type]
