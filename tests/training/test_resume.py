"""Law 10: a run killed at any instant resumes to the same bits."""

import os
import random
import signal
import time

import pytest

from . import small

PLACES = {
    "rollout": ("posttrain.engines.local.engine:LocalEngine._step", 160),
    "environment": ("posttrain_user_letters:Letters.step", 60),
    "update": ("posttrain.training.updater:Optimizer.collect", 16),
    "optimizer": ("posttrain.training.updater:Optimizer.step", 8),
    "metrics": ("posttrain.runs.metrics:MetricsLog.write", 10),
    "sync": ("os:fsync", 60),
    "rename": ("pathlib:Path.rename", 6),
    "replace": ("os:replace", 12),
    "delete": ("shutil:rmtree", 10),
    "tensors": ("torch:save", 5),
}
"""Where a process dies, and about how often that place is passed in a whole run."""
CHAIN = (("environment", 20), ("optimizer", 3), ("rename", 2), ("tensors", 1))
"""Where one run dies in turn, and at which passage of each of its processes."""


@pytest.fixture(scope="module")
def uninterrupted(tiny_model, tmp_path_factory):
    runs = tmp_path_factory.mktemp("whole")
    assert small.run(small.recipe_values(tiny_model, runs)) == 0, (runs / "log.txt").read_text()
    return runs / "small"


def _kill_and_finish(model, runs, deaths, figures=False):
    """Die at each of `deaths` in turn, then run to the end; returns how the processes before the last one ended."""
    values = small.recipe_values(model, runs)
    ends = [small.run(values, resume=(runs / "small").exists(), die_at=death, figures=figures) for death in deaths]
    assert small.run(values, resume=(runs / "small").exists(), figures=figures) == 0, (runs / "log.txt").read_text()
    return ends


def _same(run, reference):
    small.assert_same(run, reference)


def test_it_resumes_to_the_same_bits_after_kills_in_turn(tiny_model, tmp_path, uninterrupted):
    deaths = [(PLACES[place][0], count) for place, count in CHAIN]
    assert _kill_and_finish(tiny_model, tmp_path, deaths) == [-signal.SIGKILL] * len(deaths)
    _same(tmp_path / "small", uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_it_resumes_to_the_same_bits_after_a_kill_there(place, tiny_model, tmp_path, uninterrupted):
    draw = random.Random(place)
    what, most = PLACES[place]
    deaths = [(what, draw.randint(1, most)) for _ in range(2)]
    _kill_and_finish(tiny_model, tmp_path, deaths, figures=True)
    _same(tmp_path / "small", uninterrupted)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chain", range(12))
def test_killed_many_times_anywhere(chain, tiny_model, tmp_path, uninterrupted):
    draw = random.Random(chain)
    deaths = []
    for _ in range(5):
        what, most = PLACES[draw.choice(list(PLACES))]
        deaths.append((what, draw.randint(1, most)))
    _kill_and_finish(tiny_model, tmp_path, deaths, figures=chain < 3)
    _same(tmp_path / "small", uninterrupted)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_with_a_checkpoint_and_a_message(number, tiny_model, tmp_path, uninterrupted):
    values = small.recipe_values(tiny_model, tmp_path)
    process = small.fork_server().Process(target=small._child, args=(values, False, None))
    process.start()
    log = tmp_path / "log.txt"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (log.exists() and "step 2/4" in log.read_text()):
        time.sleep(0.005)
    os.kill(process.pid, number)
    process.join()
    text = log.read_text()
    assert f"stopped by {signal.Signals(number).name} after step" in text
    assert f"posttrain rl --resume {tmp_path / 'small'}" in text
    assert small.run(values, resume=True) == 0
    _same(tmp_path / "small", uninterrupted)


@pytest.mark.parametrize("place", ["delete", *(pytest.param(place, marks=pytest.mark.slow) for place in PLACES)])
def test_a_signal_there_leaves_no_part_of_a_checkpoint(place, tiny_model, tmp_path, uninterrupted):
    values, (what, most) = small.recipe_values(tiny_model, tmp_path), PLACES[place]
    for count in (most - 1, most // 2, 1) if place == "delete" else (random.Random(place).randint(1, most),):
        small.run(values, resume=(tmp_path / "small").exists(), die_at=(what, count), number=signal.SIGTERM)
        assert not list((tmp_path / "small" / "checkpoints").rglob("*.partial"))
    assert small.run(values, resume=True) == 0, (tmp_path / "log.txt").read_text()
    _same(tmp_path / "small", uninterrupted)
