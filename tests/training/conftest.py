"""Every run of these tests writes declared metrics only. Models that tests share."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.models.reward import RewardModel
from posttrain.recipe.components import environment_class
from posttrain.recipe.model import ModelRecipe
from posttrain.runs.metrics import MetricsLog
from posttrain.runs.panels import all_metrics
from tests.conftest import declared, save_tiny_model


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


@pytest.fixture(scope="session")
def module():
    """The module in which recipes find the toy task, which is not the one that tests import."""
    environment_class(str(Path(__file__).parent / "letters.py"))
    return sys.modules["posttrain_user_letters"]


@pytest.fixture(scope="session")
def reward_model(tiny_model, tmp_path_factory) -> Path:
    """An exported reward model, untrained but with statistics."""
    directory = tmp_path_factory.mktemp("reward") / "model"
    model = RewardModel(ModelRecipe(path=str(tiny_model)), seed=5)
    model.set_statistics(0.1, 0.5)
    model.export(directory)
    return directory


@pytest.fixture(scope="session")
def teacher_model(tmp_path_factory) -> Path:
    """Other weights than those of `tiny_model`, far from uniform."""
    directory = save_tiny_model(tmp_path_factory.mktemp("teacher"), seed=5)
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    model.save_pretrained(directory)
    return directory
