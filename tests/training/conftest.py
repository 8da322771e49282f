"""Every run of these tests writes declared metrics only."""

import pytest

from posttrain.recipe.metrics import declared
from posttrain.runs.metrics import MetricsLog
from posttrain.runs.panels import all_metrics


@pytest.fixture(autouse=True)
def declared_metrics(monkeypatch):
    """Fail a test in which a run of this process writes a metric that no section of a recipe declares."""
    write, known, undeclared = MetricsLog.write, set(), set()

    def checked(log, step, kind, values):
        metrics = all_metrics().values()
        # Lines of evaluations have counts and texts without a slash, such as `episodes` and `policy`.
        names = {key for key in values if "/" in key or kind == "train"} - known
        undeclared.update(name for name in names if declared(name, metrics) is None)
        known.update(names)
        write(log, step, kind, values)

    monkeypatch.setattr(MetricsLog, "write", checked)
    yield
    assert undeclared == set(), "declare the metric in the section of the recipe that it belongs to"
