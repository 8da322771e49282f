"""A pipeline skips what is finished, runs again what has changed, and resumes what was interrupted."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import posttrain.training.pipeline as module
from posttrain.errors import InputError
from posttrain.recipe.pipeline import load_pipeline
from posttrain.runs.directory import RunDirectory
from posttrain.training.pipeline import run_pipeline

TEXT = """
name: p
stages:
- {name: warm, stage: sft, environment: {type: bandit}}
- {name: learn, stage: rl, from: warm}
- {name: after, stage: evaluate, from: learn}
"""


class Stages:
    """Stands in for `run_stage`: makes the run and a model whose content depends on the recipe."""

    def __init__(self):
        self.calls = []
        self.interrupt = None
        self.content = {}

    def __call__(self, recipe, *, resume=False, overwrite=False, console=None):
        self.calls.append((recipe.name, "resume" if resume else "overwrite" if overwrite else "fresh"))
        path = f"{recipe.runs}/{recipe.name}"
        run = RunDirectory.open(path) if resume else RunDirectory.create(recipe, overwrite)
        if recipe.name == self.interrupt:
            raise KeyboardInterrupt
        if recipe.stage != "evaluate":
            (run.path / "model").mkdir(exist_ok=True)
            (run.path / "model" / "weights").write_text(self.content.get(recipe.name, f"{recipe.name} {recipe.seed}"))
        return run


@pytest.fixture
def stages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = Stages()
    monkeypatch.setattr(module, "run_stage", recorder)
    return recorder


def play(stages, *overrides, **options):
    """Run the pipeline; returns which stages ran, how, and what was said."""
    Path("p.yaml").write_text(TEXT)
    stages.calls = []
    console = Console(file=StringIO(), width=200)
    run_pipeline(load_pipeline("p.yaml", list(overrides)), console=console, **options)
    return stages.calls, console.file.getvalue().splitlines()


def test_the_second_call_runs_nothing(stages):
    calls, said = play(stages)
    assert calls == [("warm", "fresh"), ("learn", "fresh"), ("after", "fresh")]
    assert said[0] == "stage warm: runs (not run yet)"
    assert play(stages) == ([], [f"stage {name}: finished, nothing has changed" for name in ("warm", "learn", "after")])


def test_a_changed_recipe_runs_again_with_what_follows_from_it(stages):
    play(stages)
    calls, said = play(stages, "stages.warm.seed=1")
    # The stand-in for learn writes the same model again, so what follows it has nothing new to do.
    assert calls == [("warm", "overwrite"), ("learn", "overwrite")]
    assert said == [
        "stage warm: runs (its recipe has changed)",
        "stage learn: runs (stage warm has changed)",
        "stage after: finished, nothing has changed",
    ]


def test_the_same_model_from_a_changed_recipe_changes_nothing_downstream(stages):
    stages.content = {"warm": "always the same"}
    play(stages)
    assert play(stages, "stages.warm.epochs=2")[0] == [("warm", "overwrite")]


def test_where_runs_and_sinks_are_does_not_count(stages):
    play(stages)
    Path("runs").rename("moved")
    assert play(stages, "runs=moved", "stages.learn.sinks=[tensorboard]")[0] == []


def test_a_tampered_model_runs_again(stages):
    play(stages)
    Path("runs/p/warm/model/weights").write_text("something else")
    calls, said = play(stages)
    assert (calls, said[0]) == (
        [("warm", "overwrite")],
        "stage warm: runs (its exported model is not the one it wrote)",
    )


def test_an_interrupted_stage_is_resumed(stages):
    stages.interrupt = "learn"
    with pytest.raises(KeyboardInterrupt):
        play(stages)
    stages.interrupt = None
    calls, said = play(stages)
    assert calls == [("learn", "resume"), ("after", "fresh")]
    assert said[1] == "stage learn: goes on (it was interrupted)"


def test_an_interrupted_stage_whose_recipe_changed_begins_again(stages):
    stages.interrupt = "learn"
    with pytest.raises(KeyboardInterrupt):
        play(stages)
    stages.interrupt = None
    calls, said = play(stages, "stages.learn.steps=3")
    assert calls == [("learn", "overwrite"), ("after", "fresh")]
    assert said[1] == "stage learn: runs (its recipe has changed after it was interrupted)"


def test_only_and_from_choose_stages(stages):
    with pytest.raises(
        InputError, match="stage learn uses the model of warm, which has not finished; run `posttrain pipeline`"
    ):
        play(stages, only="learn")
    assert play(stages, only="warm")[0] == [("warm", "fresh")]
    assert play(stages, start_from="learn")[0] == [("learn", "fresh"), ("after", "fresh")]
    assert play(stages, only="after", overwrite=True)[0] == [("after", "overwrite")]
    with pytest.raises(
        InputError, match="--only lern: the pipeline has no such stage; its stages are warm, learn, after"
    ):
        play(stages, only="lern")
    with pytest.raises(InputError, match="--only and --from exclude each other"):
        play(stages, only="warm", start_from="warm")
