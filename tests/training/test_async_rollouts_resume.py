"""A run that samples ahead and is killed at any instant resumes to the same bits; its buffer survives."""

import random
import shutil
import signal

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


def recipe(tiny, runs):
    return async_runs.values(tiny, runs, "small", {"async_rollouts": 2}, checkpoint=CHECKPOINT)


@pytest.fixture(scope="module")
def uninterrupted(tiny_model, tmp_path_factory):
    return small.finished(recipe(tiny_model, tmp_path_factory.mktemp("whole")))


def _resumes_to(reference, values):
    """The run ends with the bits of `reference`, and without its buffer."""
    run = small.finished(values)
    small.assert_same(run, reference)
    assert list((run / "async_rollouts").iterdir()) == []


@pytest.mark.parametrize("place", small.cases(PLACES, ["journal"]))
def test_it_resumes_to_the_same_bits_after_a_kill_there(place, tiny_model, tmp_path, uninterrupted):
    draw, (what, most) = random.Random(place), PLACES[place]
    values = recipe(tiny_model, tmp_path)
    small.killed(values, *((what, draw.randint(1, most)) for _ in range(2)))
    _resumes_to(uninterrupted, values)


@pytest.mark.slow
def test_it_resumes_from_an_older_checkpoint_without_its_buffer(tiny_model, tmp_path, uninterrupted):
    values, run = recipe(tiny_model, tmp_path), tmp_path / "small"
    # Its fifth step is trained on, and the checkpoint of the fourth has had the buffer of the third and fourth removed.
    assert small.killed(values, ("posttrain.training.updater:Optimizer.step", 10)) == [-9]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000002", "step_000004"]
    assert [path.name for path in (run / "async_rollouts").iterdir()] == ["batch_000005.jsonl"]
    shutil.rmtree(run / "checkpoints" / "step_000004")
    _resumes_to(uninterrupted, values)


@pytest.mark.parametrize("number", small.cases([signal.SIGTERM, signal.SIGINT], [signal.SIGTERM]))
def test_a_signal_stops_both_sides_with_a_checkpoint(number, tiny_model, tmp_path, uninterrupted):
    values = recipe(tiny_model, tmp_path)
    text = small.stopped(values, number, "step 2/5")
    assert f"stopped by {signal.Signals(number).name} after step" in text
    _resumes_to(uninterrupted, values)


@pytest.mark.slow
def test_complete_batches_of_a_killed_run_are_not_sampled_again(tiny_model, tmp_path, uninterrupted):
    values = recipe(tiny_model, tmp_path)
    values["checkpoint"] = CHECKPOINT | {"every": 50}
    values["evaluation"] = values["evaluation"] | {"every": 0}  # whose best one would be saved
    folder = tmp_path / "small" / "async_rollouts"

    def buffered():
        return {path.name: path.read_bytes() for path in folder.iterdir() if b'{"end"' in path.read_bytes()}

    # The learner dies in its third step: the batches of steps 1 to 3 exist, but no checkpoint.
    assert small.killed(values, ("posttrain.training.updater:Optimizer.step", 5)) == [-9]
    complete = buffered()
    assert len(complete) >= 3
    # Killed again before anything is sampled: complete batches are unchanged.
    small.killed(values, ("posttrain.engines.local.engine:LocalEngine._step", 1))
    assert complete.items() <= buffered().items()
    mine, whole = (small.episodes(run) for run in (small.finished(values), uninterrupted))
    steps = [f"step_{step:06d}.train.jsonl.zst" for step in range(1, 6)]
    assert [mine[step] for step in steps] == [whole[step] for step in steps]


def test_a_resumed_run_replays_the_experts_of_its_buffered_episodes(tmp_path):
    """They were chosen by weights that the run has no more."""

    def values(name):
        (tmp_path / name).mkdir()
        made = recipe(save_family(tmp_path / "experts", "mixtral"), tmp_path / name)
        made["model"] |= {"router_replay": True, "router_aux_loss": 0.01}
        made["optimizer"]["learning_rate"] = 0.03
        made["evaluation"]["every"] = 0
        return made

    whole, values = small.finished(values("whole")), values("killed")
    assert small.killed(values, PLACES["journal"]) == [-9]
    _resumes_to(whole, values)
    assert max(line["router/changed"] for line in small.lines(whole, "train")) > 0.01
