"""Errors with a message for the user: one sentence that names the cause and the remedy."""

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any

_LONG = re.compile(r"(\S{200})\S{800,}")


class PosttrainError(Exception):
    """A failure with a message for the user. `exit_code` is the exit code of the command line.

    Words of 1,000 or more characters, which can only come from input, are truncated to 200.
    """

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(_LONG.sub(r"\1…", message))


class InputError(PosttrainError):
    """Wrong input: a recipe, a file, a model or a name. Nothing was run."""

    exit_code = 2


class DoesNotFit(InputError):
    """The plan of a run needs more memory than there is."""

    exit_code = 3


class RunError(PosttrainError):
    """A run started and could not continue. Its checkpoints are kept."""

    exit_code = 1


class NothingLearned(RunError):
    """A training run has ended, and its held-out measure did not improve beyond chance."""

    exit_code = 4


class WorkersLost(RunError):
    """Workers of a cluster died too often or did not restart, so every further request would fail as well."""


def require_type(name: str, value: Any, *kinds: type) -> None:
    """InputError, which names the argument, unless `value` has one of the types. NumPy's numbers are `int` and `float`, and
    True and False are neither."""
    wide = tuple({int: Integral, float: Real}.get(kind, kind) for kind in kinds)
    if not isinstance(value, wide) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise InputError(f"the argument `{name}` has the type {type(value).__name__}; pass {expected}")


@contextmanager
def naming(**keys: str) -> Iterator[None]:
    """Let InputErrors of the block name other keys than `model.path` (`path`) and `model.device` (`device`), for models of other
    sections and of options."""
    try:
        yield
    except InputError as error:
        message = str(error)
        for name, key in keys.items():
            message = re.sub(rf"(?<![\w.])model\.{name}\b", key, message)
        raise type(error)(message) from error


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print Python warnings inside the block as sentences, without the line of code that warns."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *place, **more: print(f"posttrain: warning: {message}", file=sys.stderr)
        yield
