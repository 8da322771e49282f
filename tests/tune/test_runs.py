"""Studies of real runs in separate processes, on a tiny model."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
import yaml
from optuna.trial import TrialState

from posttrain.recipe.compose import load_recipe
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import read_metrics
from posttrain.tune.run import TrialJob
from tests.training import preferences, small

from . import studies

WITHOUT_GPU = """
import importlib, torch
def refuse(*_): raise SystemExit("a GPU was asked for")
for name in ("is_available", "device_count", "current_device", "_lazy_init", "get_device_capability"):
    setattr(torch.cuda, name, refuse)
from posttrain.tune.trial import preloaded
for stage in ("rl", "sft", "dpo", "reward"):
    for module in preloaded(stage): importlib.import_module(module)
"""
DEADLY = Path(__file__).parent / "deadly.py"


@pytest.fixture(scope="module", autouse=True)
def server():
    """Start the server of other tests first: that of a study, from which later tests would fork as well, has imported less."""
    small.fork_server()
    forkserver.ensure_running()


def keys(tiny: Path, **changes) -> dict:
    """A few steps of RL on a toy task."""
    values = {
        "stage": "rl",
        "model": {"path": str(tiny), "threads": 1},
        "environment": {"type": str(DEADLY)},
        "steps": 2,
        "seeds": {"start": 0, "count": 8},
        "rollout": {"groups_per_step": 2, "episodes_per_group": 2, "tokens_per_turn": 3, "tokens_per_episode": 200},
        "evaluation": {"every": 1, "seeds": {"start": 1000, "count": 2}, "final_seeds": {"start": 2000, "count": 2}},
        "checkpoint": {"every": 1},
    }
    return values | changes


@pytest.mark.slow
def test_supervised_trials_two_at_a_time(tiny_model, tmp_path):
    base = preferences.recipe_values("sft", tiny_model, tmp_path, steps=3, evaluation={"every": 2})
    base = {key: value for key, value in base.items() if key not in ("name", "runs")}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    changes = {
        "recipe": "base.yaml",
        "keys": None,
        "search": {"optimizer.learning_rate": {"low": 1e-5, "high": 1e-2, "log": True}},
        "objective": {"metric": "validation/loss", "direction": "minimize"},
        "start": [{"optimizer.learning_rate": 1e-2}],
    }
    assert studies.tune(tmp_path, "workers=2", "trials=2", "weights=all", **changes) == 0
    found = studies.trials(tmp_path)
    assert [trial.state for trial in found] == [TrialState.COMPLETE] * 2
    for trial in found:
        run = RunDirectory.open(tmp_path / f"runs/s/trials/{trial.number:04d}")
        losses = {
            line["step"]: line["validation/loss"] for line in read_metrics(run.metrics) if line["kind"] == "evaluation"
        }
        assert trial.intermediate_values == {step: loss for step, loss in losses.items() if step > 0}
        assert trial.value == min(trial.intermediate_values.values())
        assert run.load_recipe().optimizer.learning_rate == trial.params["optimizer.learning_rate"]
        assert (run.path / "model" / "config.json").is_file()
    best = min(found, key=lambda trial: trial.value)
    recipe = load_recipe([str(tmp_path / "base.yaml"), str(tmp_path / "runs/s/best.yaml")], [], "sft")
    assert recipe.optimizer.learning_rate == best.params["optimizer.learning_rate"]


def test_a_run_that_dies_is_a_failed_trial_with_its_reason(tiny_model, tmp_path):
    search = {"environment.end": ["kill", "raise", "none"]}
    start = [{"environment.end": end} for end in search["environment.end"]]
    made = keys(tiny_model, steps=1)
    assert studies.tune(tmp_path, keys=made, search=search, start=start, trials=4) == 0
    killed, raised, sound, _ = studies.trials(tmp_path)
    assert killed.state == raised.state == TrialState.FAIL
    assert killed.user_attrs["reason"].startswith("killed by SIGKILL")
    assert "no room left" in raised.user_attrs["reason"]
    assert sound.state == TrialState.COMPLETE
    assert yaml.safe_load((tmp_path / "runs/s/best.yaml").read_text()) == {"environment": {"end": "none"}}
    kept = {path.parent.name for path in (tmp_path / "runs/s/trials").glob("*/model")}
    assert kept == {"0002"}


@pytest.mark.slow
def test_common_start_up_does_not_initialize_a_gpu():
    """A process forked from one that has queried GPUs cannot use them."""
    subprocess.run([sys.executable, "-c", WITHOUT_GPU], check=True, timeout=280)


def test_a_pruned_run_saves_a_checkpoint_and_ends(tiny_model, tmp_path):
    settings = [{"environment.pay": 1.0, "steps": 2}, {"environment.pay": 0.1, "steps": 2000}]
    start = [{"both": setting} for setting in settings]
    changes = {"search": {"both": {"together": settings}}, "start": start, "trials": 2}
    made, changes["weights"] = keys(tiny_model, checkpoint={"every": 1000}), "all"
    assert studies.tune(tmp_path, keys=made, pruner={"type": "median", "startup_trials": 1}, **changes) == 0
    first, pruned = studies.trials(tmp_path)
    assert (first.state, pruned.state) == (TrialState.COMPLETE, TrialState.PRUNED)
    assert list(pruned.intermediate_values) == [1]
    assert pruned.value == pruned.intermediate_values[1] < first.value
    run = RunDirectory.open(tmp_path / "runs/s/trials/0001")
    assert 1 <= run.saved_step() < 2000
    assert "saved as step_" in (run.logs / "output.txt").read_text()
    assert not run.report.exists()
    assert not list(run.path.rglob("*.partial"))
    with run.lock():
        pass


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_study_killed_during_a_run_resumes_its_checkpoint(tiny_model, tmp_path):
    search = {"optimizer.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}}
    changes = {"keys": keys(tiny_model, steps=6), "search": search, "trials": 2}
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    assert studies.tune(tmp_path / "whole", **changes) == 0
    process = multiprocessing.get_context("spawn").Process(
        target=studies.tune, args=(tmp_path / "killed",), kwargs=changes
    )
    process.start()
    run = RunDirectory(tmp_path / "killed/runs/s/trials/0001")
    while run.saved_step() < 2 and process.is_alive():
        time.sleep(0.02)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -9
    assert not run.report.exists()
    assert studies.tune(tmp_path / "killed", "--resume", **changes) == 0
    assert studies.summary(tmp_path / "killed") == studies.summary(tmp_path / "whole")
    steps = [line["step"] for line in read_metrics(run.metrics) if line["kind"] == "train"]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert not list(tmp_path.rglob("*.partial"))


def stored(folder):
    """Bytes of checkpoints and models in `folder`, a file with several names once, and bytes of everything else.

    Checkpoints that were being written or deleted when their process was stopped are left out.
    """
    weights, others = {}, 0
    for path in folder.rglob("*"):
        if any(part.endswith(".partial") for part in path.parts):
            continue
        if path.is_file() and {"checkpoints", "model"} & set(path.parts):
            weights[path.stat().st_ino] = path.stat().st_size
        elif path.is_file():
            others += path.stat().st_size
    return sum(weights.values()), others


@pytest.mark.timeout(900)
def test_a_study_of_full_weights_stores_the_best_model_and_what_it_resumes_from(tiny_model, tmp_path, monkeypatch):
    search = {"optimizer.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}}
    changes = {"keys": keys(tiny_model, steps=3), "search": search, "trials": 2}
    sizes, end = [], TrialJob.end
    monkeypatch.setattr(TrialJob, "end", lambda job: (end(job), sizes.append(stored(job.study.directory))))
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    assert studies.tune(tmp_path / "whole", **changes) == 0
    model, _ = stored(min((tmp_path / "whole").rglob("model")))
    assert [weights // model for weights, _ in sizes] == [1, 1]  # that of the best trial
    assert max(weights % model for weights, _ in sizes) == 0
    assert sizes[-1][1] < 400_000 * len(sizes)

    poll = TrialJob.poll

    def stop(job):
        poll(job)
        if job.trial.number == 1 and job.attempt.run.saved_step() >= 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrialJob, "poll", stop)
        assert studies.tune(tmp_path / "stopped", **changes) == 130
    # The best model so far, and of the second trial its best policy and one checkpoint, whose optimizer holds two moments
    # and 0.6 models of small tensors. A second whole checkpoint would make it 8.2 models.
    assert model < stored(tmp_path / "stopped/runs/s")[0] < 5.7 * model
    assert studies.tune(tmp_path / "stopped", "--resume", **changes) == 0
    assert studies.summary(tmp_path / "stopped") == studies.summary(tmp_path / "whole")
    kept = [sorted((tmp_path / name).rglob("model/model.safetensors")) for name in ("whole", "stopped")]
    assert [path.relative_to(tmp_path / "whole") for path in kept[0]] == [
        path.relative_to(tmp_path / "stopped") for path in kept[1]
    ]
    assert [path.read_bytes() for path in kept[0]] == [path.read_bytes() for path in kept[1]]
