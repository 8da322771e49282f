"""Law 10: a run killed at any instant resumes to the same bits."""

import random
import signal

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


def _drawn(draw, places):
    return [(what, draw.randint(1, most)) for what, most in map(PLACES.get, places)]


def _chain(draw):
    return [death for _ in range(5) for death in _drawn(draw, [draw.choice(list(PLACES))])]


DEATHS = {
    "in turn": [(PLACES[place][0], count) for place, count in CHAIN],
    **{place: _drawn(random.Random(place), [place] * 2) for place in PLACES},
    **{f"chain {number}": _chain(random.Random(number)) for number in range(12)},
}
FIGURES = (*PLACES, "chain 0", "chain 1", "chain 2")
"""Runs that draw figures, too."""


@pytest.fixture(scope="module")
def uninterrupted(tiny_model, tmp_path_factory):
    return small.finished(small.recipe_values(tiny_model, tmp_path_factory.mktemp("whole")))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", small.cases(DEATHS, ["in turn"]))
def test_it_resumes_to_the_same_bits_after_kills(name, tiny_model, tmp_path, uninterrupted):
    values = small.recipe_values(tiny_model, tmp_path)
    ends = small.killed(values, *DEATHS[name], figures=name in FIGURES)
    small.assert_same(small.finished(values, figures=name in FIGURES), uninterrupted)
    assert name != "in turn" or ends == [-signal.SIGKILL] * len(CHAIN)


@pytest.mark.parametrize("number", small.cases([signal.SIGTERM, signal.SIGINT], [signal.SIGTERM]))
def test_a_signal_ends_with_a_checkpoint_and_a_message(number, tiny_model, tmp_path, uninterrupted):
    values = small.recipe_values(tiny_model, tmp_path)
    text = small.stopped(values, number, "step 2/4")
    assert f"stopped by {signal.Signals(number).name} after step" in text
    assert f"posttrain rl --resume {tmp_path / 'small'}" in text
    small.assert_same(small.finished(values), uninterrupted)


@pytest.mark.parametrize("place", ["delete", *(pytest.param(place, marks=pytest.mark.slow) for place in PLACES)])
def test_a_signal_there_leaves_no_part_of_a_checkpoint(place, tiny_model, tmp_path, uninterrupted):
    values, (what, most) = small.recipe_values(tiny_model, tmp_path), PLACES[place]
    for count in (most - 1, most // 2, 1) if place == "delete" else (random.Random(place).randint(1, most),):
        small.killed(values, (what, count), number=signal.SIGTERM)
        assert not list((tmp_path / "small" / "checkpoints").rglob("*.partial"))
    small.assert_same(small.finished(values), uninterrupted)
