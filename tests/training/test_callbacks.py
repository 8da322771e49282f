"""Callbacks run between two steps: whatever they raise, the run resumes to the same bits."""

from types import SimpleNamespace

import pytest

from posttrain.training.optimizer import Optimizer
from posttrain.training.trainer import Callback

from . import async_runs, small
from .test_resume_rows import values as of_rows
from .test_resume_state import distill

ERRORS = {"interrupt": KeyboardInterrupt, "error": ZeroDivisionError, "exit": SystemExit}
RUNS = ["rl", "rl_async", "rl_async_continue", "rl_guarded", "distill", "sft", "dpo", "bco", "dpo_moving", "reward"]
CASES = [(kind, error) for kind in RUNS for error in ERRORS]
QUICK = [("rl_async", "interrupt")]


def recipe(kind, tiny, teacher, runs):
    common = {"checkpoint": {"every": 2, "keep": 2, "keep_state": "always"}, "plots": False}
    if kind == "distill":
        return distill(SimpleNamespace(tiny=tiny, teacher=teacher), runs) | common
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
    return small.train(values, resume=resume, callbacks=[callback])[0].path


@pytest.mark.parametrize("case", small.cases(CASES, QUICK), ids=" ".join)
def test_a_run_resumes_from_every_callback(case, tiny_model, teacher_model, tmp_path):
    kind, error = case
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
        small.assert_same(run, reference, stored=kind.startswith("rl"))


def test_callbacks_see_a_step_before_its_evaluation_and_an_error_within_an_update_saves_no_checkpoint(
    tiny_model, tmp_path, monkeypatch
):
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
    seen = Raises(None)
    reference = play(recipe("rl", tiny_model, None, whole), seen)
    assert seen.calls == [
        ("evaluation", 0),
        *(("episodes", 1), ("step", 1)),
        *(("episodes", 2), ("step", 2), ("evaluation", 2)),
        *(("episodes", 3), ("step", 3), ("evaluation", 3)),
    ]
    values = recipe("rl", tiny_model, None, broken)
    monkeypatch.setattr(Optimizer, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        play(values, Callback())
    assert [path.name for path in (broken / "small" / "checkpoints").iterdir()] == ["step_000000"]
    run = play(values, Callback(), resume=True)
    small.assert_same(run, reference, stored=False)
