"""Checkpoints of any number of processes: they resume with as many to the same bits, with others to float rounding."""

import shutil

import pytest
from safetensors.torch import load_file

from tests.training import preferences, small

from . import together
from .test_parity import WEIGHTS, models  # noqa: F401

OPTIMIZER = {"learning_rate": 3e-3, "warmup_updates": 2}


def values(tiny, folder, **changes):
    """Six updates, saved after each; `steps` may be fewer, since nothing depends on how many there will be."""
    folder.mkdir(parents=True, exist_ok=True)
    changes = {"steps": 6, "rows_per_update": 5, "optimizer": OPTIMIZER, "evaluation": {"every": 0}} | changes
    return preferences.recipe_values("sft", tiny, folder, **changes)


def weights(folder):
    return load_file(folder / "small" / "model" / "model.safetensors")


def difference(one, other):
    one, other = weights(one), weights(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory):  # noqa: F811
    """Whole runs of one and two processes, and their first three steps, resumed by one, two and four.

    FROM_TO is a run that FROM processes began and TO processes ended; 2_killed_2 lost a process on its way.
    """
    folder = tmp_path_factory.mktemp("runs")
    half = {"steps": 3}

    def start(processes, *names, die=None, **changes):
        jobs = [{"values": values(models, folder / name, **changes), "die": die} for name in names]
        return together.run(processes, jobs, folder)

    def go_on(processes, *names):
        jobs = [{"values": values(models, folder / name), "resume": True} for name in names]
        return together.run(processes, jobs, folder)

    def copy(name, *others):
        for other in others:
            shutil.copytree(folder / name, folder / other)

    log = folder / "log-0.txt"
    assert start(1, "1") == [[0]], log.read_text()[-3000:]
    assert start(1, "1_2", **half) == [[0]]
    assert start(2, "2") == [[0, 0]], log.read_text()[-3000:]
    assert start(2, "2_2", **half) == [[0, 0]], log.read_text()[-3000:]
    killed = start(2, "2_killed_2", die=(1, "posttrain.training.optimizer:Optimizer.step", 4))
    copy("2_2", "2_1", "2_4")
    assert go_on(1, "2_1") == [[0]], log.read_text()[-3000:]
    assert go_on(2, "2_2", "1_2", "2_killed_2") == [[0, 0]] * 3, log.read_text()[-3000:]
    assert go_on(4, "2_4") == [[0] * 4], log.read_text()[-3000:]
    return folder, killed


def test_as_many_processes_go_on_to_the_same_bits(runs):
    folder, _ = runs
    assert small.weights(folder / "2_2" / "small") == small.weights(folder / "2" / "small")


@pytest.mark.parametrize("name", ["2_1", "2_4", "1_2"])
def test_other_numbers_of_processes_go_on_to_the_same_numbers(runs, name):
    folder, _ = runs
    assert 0 <= difference(folder / name, folder / "1") < WEIGHTS
    steps = [line["step"] for line in small.metrics(folder / name / "small") if line["kind"] == "train"]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_where_one_process_is_killed_the_others_stop_and_the_run_goes_on(runs):
    folder, killed = runs
    assert killed == [[1, -1]]  # the one that was left ends with an error, the other leaves no word
    assert "go on with --resume" in (folder / "log-0.txt").read_text()
    assert small.weights(folder / "2_killed_2" / "small") == small.weights(folder / "2" / "small")
