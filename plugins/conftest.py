"""Fixtures and settings of the core's tests, for the tests of the plug-ins."""

from tests.conftest import figures, memory_of_any_machine, pytest_runtest_teardown, tiny_model, tiny_policy  # noqa: F401
