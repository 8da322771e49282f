"""A run that samples ahead and is killed at any instant resumes to the same bits; its buffer survives."""

import os
import random
import shutil
import signal
import time

import pytest

from tests.models.families import save_family

from . import async_runs, small

PLACES = {
    "engine": ("posttrain.engines.local.engine:LocalEngine._step", 100),
    "journal": ("posttrain.rollout.journal:EpisodeBuffer._write", 30),
    "journal end": ("posttrain.rollout.journal:EpisodeBuffer.finish", 5),
    "hand over": ("posttrain.training.async_rollouts:Sampler._hand_over", 5),
    "environment": ("posttrain_user_letters:Letters.step", 60),
    "optimizer": ("posttrain.training.updater:Optimizer.step", 8),
    "publish": ("posttrain.rollout.weight_sync:PublishedWeights.publish", 5),
    "metrics": ("posttrain.runs.metrics:MetricsLog.write", 10),
    "sync": ("os:fsync", 60),
    "tensors": ("torch:save", 5),
}
"""Where a process dies, and about how often that place is passed in a whole run."""
CHECKPOINT = {"every": 2, "keep": 2, "keep_state": "always"}
QUICK = ("journal",)
"""Places that are not slow tests."""


def recipe(tiny, runs):
    return async_runs.values(tiny, runs, "small", {"async_rollouts": 2}, checkpoint=CHECKPOINT)


@pytest.fixture(scope="module")
def uninterrupted(tiny_model, tmp_path_factory):
    runs = tmp_path_factory.mktemp("whole")
    assert small.run(recipe(tiny_model, runs)) == 0, (runs / "log.txt").read_text()
    return runs / "small"


def _same(run, reference):
    small.assert_same(run, reference)
    assert list((run / "async_rollouts").iterdir()) == []


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=[] if place in QUICK else pytest.mark.slow) for place in PLACES]
)
def test_it_resumes_to_the_same_bits_after_a_kill_there(place, tiny_model, tmp_path, uninterrupted):
    draw, values = random.Random(place), recipe(tiny_model, tmp_path)
    what, most = PLACES[place]
    for _ in range(2):
        small.run(values, resume=(tmp_path / "small").exists(), die_at=(what, draw.randint(1, most)))
    assert small.run(values, resume=(tmp_path / "small").exists()) == 0, (tmp_path / "log.txt").read_text()
    _same(tmp_path / "small", uninterrupted)


@pytest.mark.slow
def test_it_resumes_from_an_older_checkpoint_without_its_buffer(tiny_model, tmp_path, uninterrupted):
    values, run = recipe(tiny_model, tmp_path), tmp_path / "small"
    # Its fifth step is trained on, and the checkpoint of the fourth has had the buffer of the third and fourth removed.
    assert small.run(values, die_at=("posttrain.training.updater:Optimizer.step", 10)) == -9
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000002", "step_000004"]
    assert [path.name for path in (run / "async_rollouts").iterdir()] == ["batch_000005.jsonl"]
    shutil.rmtree(run / "checkpoints" / "step_000004")
    assert small.run(values, resume=True) == 0, (tmp_path / "log.txt").read_text()
    _same(run, uninterrupted)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_stops_both_sides_with_a_checkpoint(number, tiny_model, tmp_path, uninterrupted):
    values = recipe(tiny_model, tmp_path)
    process = small.fork_server().Process(target=small._child, args=(values, False, None))
    process.start()
    log, deadline = tmp_path / "log.txt", time.monotonic() + 120
    while time.monotonic() < deadline and not (log.exists() and "step 2/5" in log.read_text()):
        time.sleep(0.005)
    os.kill(process.pid, number)
    process.join()
    assert f"stopped by {signal.Signals(number).name} after step" in log.read_text()
    assert small.run(values, resume=True) == 0, log.read_text()
    _same(tmp_path / "small", uninterrupted)


@pytest.mark.slow
def test_complete_batches_of_a_killed_run_are_not_sampled_again(tiny_model, tmp_path, uninterrupted):
    values = recipe(tiny_model, tmp_path)
    values["checkpoint"] = CHECKPOINT | {"every": 50}
    values["evaluation"] = values["evaluation"] | {"every": 0}  # whose best one would be saved
    # The learner dies in its third step: the batches of steps 1 to 3 exist, but no checkpoint.
    assert small.run(values, die_at=("posttrain.training.updater:Optimizer.step", 5)) == -9
    left = {path.name: path.read_bytes() for path in (tmp_path / "small" / "async_rollouts").iterdir()}
    complete = [name for name, content in left.items() if b'{"end"' in content]
    assert len(complete) >= 3
    # Killed again before anything is sampled: complete batches are unchanged.
    small.run(values, resume=True, die_at=("posttrain.engines.local.engine:LocalEngine._step", 1))
    assert {name: (tmp_path / "small" / "async_rollouts" / name).read_bytes() for name in complete} == {
        name: left[name] for name in complete
    }
    assert small.run(values, resume=True) == 0
    mine, whole = (small.episodes(run) for run in (tmp_path / "small", uninterrupted))
    steps = [f"step_{step:06d}.train.jsonl.zst" for step in range(1, 6)]
    assert [mine[step] for step in steps] == [whole[step] for step in steps]


def test_a_resumed_run_replays_the_experts_of_its_buffered_episodes(tmp_path):
    """They were chosen by weights that the run has no more."""
    values = {}
    for name in ("whole", "killed"):
        values[name] = recipe(save_family(tmp_path / "experts", "mixtral"), tmp_path / name)
        (tmp_path / name).mkdir()
        values[name]["model"] |= {"router_replay": True, "router_aux_loss": 0.01}
        values[name]["optimizer"]["learning_rate"] = 0.03
        values[name]["evaluation"]["every"] = 0
    assert small.run(values["whole"]) == 0, (tmp_path / "whole" / "log.txt").read_text()
    place, most = PLACES["journal"]
    assert small.run(values["killed"], die_at=(place, most)) == -9
    assert small.run(values["killed"], resume=True) == 0, (tmp_path / "killed" / "log.txt").read_text()
    _same(tmp_path / "killed" / "small", tmp_path / "whole" / "small")
    changed = [
        line["router/changed"] for line in small.metrics(tmp_path / "whole" / "small") if line["kind"] == "train"
    ]
    assert max(changed) > 0.01
