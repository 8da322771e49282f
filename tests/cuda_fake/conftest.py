"""Fixtures of the checks, which run in the process that `child.py` starts."""

import pytest


@pytest.fixture
def device():
    """A fake GPU, with counts from zero."""
    from tests.cuda_fake.device import fake_cuda

    with fake_cuda() as fake:
        yield fake
