"""Fixtures of the training tests."""

from unittest.mock import patch

import pytest


@pytest.fixture(autouse=True)
def without_figures(request):
    """Skip the figures of runs in this process, unless the test is marked `figures`: they take most of a small run's time."""
    if request.node.get_closest_marker("figures"):
        yield
        return
    with patch("posttrain.training.results.draw_plots"):
        yield
