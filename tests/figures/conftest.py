"""A run of a custom environment file."""

from tests.runs.conftest import recipe, run

__all__ = ["recipe", "run"]
