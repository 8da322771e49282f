"""Errors with a message for the user: one sentence that names the cause and the remedy."""

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

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


class RunError(PosttrainError):
    """A run started and could not continue. Its checkpoints are kept."""

    exit_code = 1


class WorkersLost(RunError):
    """Workers of a cluster died too often or did not restart, so every further request would fail as well."""


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print Python warnings inside the block as sentences, without the line of code that warns."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *place, **more: print(f"posttrain: warning: {message}", file=sys.stderr)
        yield
