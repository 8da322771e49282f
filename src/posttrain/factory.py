"""Makers of things that can also be made elsewhere: a run on a cluster puts its own makers in their place."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, ParamSpec, TypeVar

_state = {"learner": False}
P = ParamSpec("P")
T = TypeVar("T")


class Factory(Generic[P, T]):
    """A function that makes something in this process, or, inside `placed_by`, lets another one make it."""

    def __init__(self, here: Callable[P, T]) -> None:
        self.here = here
        self._elsewhere: Callable[..., T] | None = None
        functools.update_wrapper(self, here)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return (self._elsewhere or self.here)(*args, **kwargs)

    @contextmanager
    def placed_by(self, maker: Callable[..., T]) -> Iterator[None]:
        """Inside, `maker` makes it, in every thread of this process."""
        before, self._elsewhere = self._elsewhere, maker
        try:
            yield
        finally:
            self._elsewhere = before


def in_learner() -> bool:
    """Whether this process is a learner of a cluster, which runs its stage itself."""
    return _state["learner"]


def become_learner() -> None:
    """From now on this process is one."""
    _state["learner"] = True
