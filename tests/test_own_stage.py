"""A stage in one file, registered as users register theirs: command, dry run, warnings, memory, checks, metrics and keys."""

import sys
from importlib import import_module

import pytest

import posttrain
from posttrain import plugins
from posttrain.cli.main import main
from posttrain.errors import InputError
from posttrain.planning.memory import memory_estimate
from posttrain.recipe.plan import ModelSizes
from posttrain.recipe.reference import metrics_of
from posttrain.recipe.stages import STAGES, register_stage
from posttrain.recipe.warnings import recipe_warnings
from posttrain.runs.metrics import read_metrics
from posttrain.runs.panels import panels_of

STAGE = '''
"""Scales the weights of a model."""

from typing import ClassVar, Literal

from pydantic import Field

from posttrain import StageRecipe, register_stage
from posttrain.errors import InputError
from posttrain.recipe.metrics import Metric, Panel


@register_stage
class ScaleRecipe(StageRecipe):
    """Scale the weights of a model."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("scale/largest", "largest weight", Panel("Weights", "absolute value", figure="optimization")),
    )

    stage: Literal["scale"] = "scale"
    """Which stage the recipe is for."""
    factor: float = Field(1.0, gt=0)
    """Factor of every weight."""
    rounds: int = 2
    """How often the weights are scaled."""

    def run(self, directory, *, resume, overwrite, console, callbacks):
        from posttrain.models.policy import Policy
        from posttrain.runs.metrics import MetricsLog

        policy = Policy(self.model, self.seed)
        with MetricsLog(directory, self.sinks) as log:
            for round in range(1, self.rounds + 1):
                for _, weight in policy.trainable():
                    weight.data *= self.factor
                largest = max(float(weight.abs().max()) for _, weight in policy.trainable())
                log.write(round, "train", {"scale/largest": largest})
                for callback in callbacks:
                    callback.on_step(round, {"scale/largest": largest})
        policy.export(directory.path / "model")

    def check(self):
        if self.rounds > 100:
            raise InputError("rounds: more than 100; lower it")
        return [f"{self.rounds} rounds can be made"]

    def warnings(self):
        return ["factor is 1, so the weights stay as they are"] if self.factor == 1 else []

    def batch_lines(self, tasks):
        return [f"{self.rounds} rounds with factor {self.factor:g}"]

    def memory_items(self, plan):
        copies = {"copies of the weights": (self.rounds * plan.sizes.parameters, "a byte per parameter and round")}
        return super().memory_items(plan) | copies
'''
POINTS = """[posttrain.stages]
scale = scale_plugin:ScaleRecipe
"""


@pytest.fixture
def scale(tmp_path, monkeypatch):
    """A distribution that adds the stage."""
    info = tmp_path / "scale_wheel-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scale-wheel\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    (tmp_path / "scale_plugin.py").write_text(STAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    for cached in (plugins.entry_points, plugins.load):
        cached.cache_clear()
    yield
    STAGES.pop("scale", None)
    for cached in (plugins.entry_points, plugins.load):
        cached.cache_clear()
    sys.modules.pop("scale_plugin", None)


def test_the_command_line_runs_it(scale, tiny_model, tmp_path, capsys):
    words = ["scale", f"model.path={tiny_model}", f"runs={tmp_path / 'runs'}", "factor=2", "name=twice"]
    assert main(words) == 0, capsys.readouterr().err
    result = posttrain.Result.open(tmp_path / "runs" / "twice")
    assert result.stage == "scale"
    assert [row["step"] for row in result.metrics] == [1, 2]
    first, second = (row["scale/largest"] for row in result.metrics)
    assert second == pytest.approx(2 * first)
    before, after = (dict(posttrain.Policy(path).trainable()) for path in (tiny_model, result.model))
    assert all((after[name] == 4 * before[name]).all() for name in before)
    assert main(words) == 2, "the name is used"
    assert main(["--help"]) == 0
    assert "scale" in capsys.readouterr().out


def test_a_dry_run_shows_batches_memory_checks_and_warnings(scale, tiny_model, tmp_path, capsys):
    words = ["scale", f"model.path={tiny_model}", f"runs={tmp_path}", "--dry-run", "--full"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    for expected in ("2 rounds with factor 1", "copies of the weights", "2 rounds can be made", "warning: factor is 1"):
        assert expected in shown
    assert [main([*words, word]) for word in ("rounds=101", "factor=0", "steps=1")] == [2, 2, 2]


def test_python_runs_it(scale, tiny_model, tmp_path):
    seen = []

    class Recorder(posttrain.Callback):
        def on_step(self, step, metrics):
            seen.append(step)

    settings = {"model": {"path": str(tiny_model)}, "runs": str(tmp_path / "runs")}
    result = posttrain.run("scale", settings, rounds=1, callbacks=[Recorder()])
    assert seen == [1]
    assert [line["kind"] for line in read_metrics(result.run / "metrics.jsonl")] == ["train"]
    with pytest.raises(InputError, match="no stage no_such"):
        posttrain.run("no_such")


def test_a_pipeline_contains_it(scale, tiny_model, tmp_path):
    file = tmp_path / "pipeline.yaml"
    file.write_text(f"stage: pipeline\nname: p\nruns: {tmp_path}\nstages:\n  - name: s\n    stage: scale\n")
    results = posttrain.pipeline(file, **{"common.model.path": str(tiny_model), "stages.s.factor": 3.0})
    assert results["s"].stage == "scale"


def test_its_keys_are_documented_and_its_metric_is_drawn(scale, capsys):
    for words in (["factor", "--stage", "scale"], ["--markdown"]):
        assert main(["recipe", *words]) == 0
        assert "Factor of every weight." in capsys.readouterr().out
    assert "scale/largest" in [metric.name for metric in metrics_of(STAGES["scale"])]
    lines = [{"kind": "train", "step": step, "scale/largest": float(step)} for step in (1, 2, 3)]
    (panel,) = [panel for panel in panels_of("optimization", lines) if panel.title == "Weights"]
    assert [curve.label for curve in panel.curves] == ["largest weight"]


def test_planning_and_warnings_ask_the_stage(scale):
    recipe = STAGES["scale"](factor=1.0, rounds=3)
    sizes = ModelSizes(100, 1, 8, 8, 1, 1, 8, 10)
    assert memory_estimate(recipe, sizes)["copies of the weights"][0] == 300
    assert recipe_warnings(recipe) == ["factor is 1, so the weights stay as they are"]
    assert recipe_warnings(STAGES["scale"](factor=2.0)) == []


def test_a_stage_needs_a_name_of_its_own(scale):
    kind = import_module("scale_plugin").ScaleRecipe
    with pytest.raises(ValueError, match="stage"):
        register_stage(posttrain.StageRecipe)
    taken = {"__annotations__": {"stage": STAGES["sft"].model_fields["stage"].annotation}, "stage": "sft"}
    with pytest.raises(ValueError, match="built-in"):
        register_stage(type("Other", (kind,), taken))
