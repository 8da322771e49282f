"""Callbacks run between two steps: whatever they raise, the run resumes to the same bits."""

import io

import pytest
from pydantic import TypeAdapter
from rich.console import Console

from posttrain.recipe.stages import Recipe
from posttrain.stages import run_stage
from posttrain.training.optimizer import Optimizer
from posttrain.training.trainer import Callback

from . import async_runs, small
from .test_distill import teacher_model  # noqa: F401
from .test_resume_distill import recipe as distillation
from .test_resume_rows import values as of_rows

ERRORS = {"interrupt": KeyboardInterrupt, "error": ZeroDivisionError, "exit": SystemExit}
QUICK = [("rl_async", "interrupt"), ("rl_guarded", "interrupt")]
"""Runs and errors that are not slow tests."""
RUNS = ["rl", "rl_async", "rl_async_continue", "rl_guarded", "distill", "sft", "dpo", "bco", "dpo_moving", "reward"]


def recipe(kind, tiny, teacher, runs):
    common = {"checkpoint": {"every": 2, "keep": 2, "keep_state": "always"}, "plots": False}
    if kind == "distill":
        return distillation(tiny, teacher, runs) | common
    if not kind.startswith("rl"):
        return of_rows(kind, tiny, runs) | common
    rollout = {} if kind in ("rl", "rl_guarded") else {"async_rollouts": 2}
    values = async_runs.values(tiny, runs, "small", rollout) | common | {"steps": 3}
    if kind == "rl_guarded":
        values["guards"] = {"action": "stop", "patience": 2, "thresholds": {"max_ratio_kl": 0.0}}
    return values


class Raises(Callback):
    """Raises once in each hook of each step."""

    def __init__(self, error):
        self.error, self.raised, self.calls = error, set(), []

    def _call(self, *event):
        self.calls.append(event)
        if event not in self.raised and self.error is not None:
            self.raised.add(event)
            raise self.error

    def on_step(self, step, metrics):
        self._call("step", step)

    def on_evaluation(self, step, values):
        self._call("evaluation", step)

    def on_episodes(self, step, episodes):
        self._call("episodes", step)


def play(values, callback, resume=False):
    validated = TypeAdapter(Recipe).validate_python(values)
    console = Console(file=io.StringIO(), width=200)
    return run_stage(validated, resume=resume, console=console, callbacks=[callback]).path


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        pytest.param(kind, error, marks=[] if (kind, error) in QUICK else pytest.mark.slow)
        for kind in RUNS
        for error in ERRORS
    ],
)
def test_a_run_resumes_from_every_callback(kind, error, tiny_model, teacher_model, tmp_path):  # noqa: F811
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    silent, callback = Raises(None), Raises(ERRORS[error])
    reference = play(recipe(kind, tiny_model, teacher_model, whole), silent)
    values = recipe(kind, tiny_model, teacher_model, broken)
    run, resume = None, False
    while run is None:
        assert len(callback.raised) <= len(silent.calls)
        try:
            run = play(values, callback, resume)
        except ERRORS[error]:
            resume = True
    assert callback.raised == set(silent.calls)
    if kind != "rl_async_continue":  # the moment at which weights arrive is not part of a resume
        small.assert_same(run, reference, stored=False)
        if kind.startswith("rl"):
            assert small.episodes(run) == small.episodes(reference)


def test_callbacks_see_a_step_before_its_evaluation(tiny_model, tmp_path):
    seen = Raises(None)
    play(recipe("rl", tiny_model, None, tmp_path), seen)
    assert seen.calls == [
        ("evaluation", 0),
        *(("episodes", 1), ("step", 1)),
        *(("episodes", 2), ("step", 2), ("evaluation", 2)),
        *(("episodes", 3), ("step", 3), ("evaluation", 3)),
    ]


def test_an_error_within_an_update_saves_no_checkpoint(tiny_model, tmp_path, monkeypatch):
    """The weights are then between two steps."""
    step, calls = Optimizer.step, []

    def interrupted(self):
        calls.append(0)
        if len(calls) == 4:  # the second update of the second step
            raise KeyboardInterrupt
        return step(self)

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    reference = play(recipe("rl", tiny_model, None, whole), Callback())
    values = recipe("rl", tiny_model, None, broken)
    monkeypatch.setattr(Optimizer, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        play(values, Callback())
    assert [path.name for path in (broken / "small" / "checkpoints").iterdir()] == ["step_000000"]
    run = play(values, Callback(), resume=True)
    small.assert_same(run, reference, stored=False)
