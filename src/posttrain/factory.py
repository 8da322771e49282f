"""Functions that make something in this process, or in another place: a cluster run replaces them with its own."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Factory(Generic[P, T]):
    """A function that makes something in this process. Inside `placed_by`, another function makes it."""

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
