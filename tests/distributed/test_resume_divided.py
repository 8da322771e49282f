"""Checkpoints of any number of processes: they resume with as many to the same bits, with others to float rounding."""

import shutil

import numpy as np
import pytest

from tests.training import preferences, small

from . import together
from .test_parity import models, same_weights  # noqa: F401

pytestmark = pytest.mark.slow
OPTIMIZER = {"learning_rate": 3e-3, "warmup_updates": 2}


def values(tiny, folder, **changes):
    """Six updates, saved after each; `steps` may be fewer, since nothing depends on how many there will be."""
    folder.mkdir(parents=True, exist_ok=True)
    changes = {"steps": 6, "rows_per_update": 5, "optimizer": OPTIMIZER, "evaluation": {"every": 0}} | changes
    return preferences.recipe_values("sft", tiny, folder, **changes)


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory):  # noqa: F811
    """Runs of two processes: whole, resumed after three steps, and resumed after losing a process."""
    folder = tmp_path_factory.mktemp("runs")
    jobs = [{"values": values(models, folder / name, **steps)} for name, steps in (("2", {}), ("2_2", {"steps": 3}))]
    together.succeed(2, jobs, folder)
    for name in ("2_1", "2_4", "2_4_together", "2_4_replicas"):
        shutil.copytree(folder / "2_2", folder / name)
    dies = (1, "posttrain.training.updater:Optimizer.step", 4)
    killed = together.run(2, [{"values": values(models, folder / "2_killed_2"), "die": dies}], folder)
    go_on(models, folder, 2, "2_2", "2_killed_2")
    return folder, killed


@pytest.fixture(scope="module")
def regrouped(runs, models):  # noqa: F811
    """Runs that FROM processes began and TO processes ended, named FROM_TO, beside the whole run "1" of one process."""
    folder, _ = runs

    def start(processes, name, **changes):
        together.succeed(processes, [{"values": values(models, folder / name, **changes)}], folder)

    start(1, "1")
    start(1, "1_2", steps=3)
    # Two processes computed the rows of the first steps together, then none did.
    start(2, "together_1", steps=3, hardware={"processes": 2, "sequence_parallel": 2})
    start(6, "replicas", steps=3, hardware={"processes": [3, 2], "sequence_parallel": 2})
    for name in ("replicas_4", "replicas_1"):
        shutil.copytree(folder / "replicas", folder / name)
    for name in ("2_1", "1_2", "2_4", "together_1", "replicas_4", "replicas_1"):
        go_on(models, folder, int(name[-1]), name)
    go_on(models, folder, 4, "2_4_together", count=4)
    go_on(models, folder, [2, 2], "2_4_replicas")
    return folder


def go_on(tiny, folder, processes, *names, count=1):
    hardware = {"processes": processes, "sequence_parallel": count}
    again = [{"values": values(tiny, folder / name, hardware=hardware), "resume": True} for name in names]
    together.succeed(int(np.prod(processes)), again, folder)


def test_resuming_with_as_many_processes_gives_the_same_bits(runs):
    folder, _ = runs
    assert small.weights(folder / "2_2" / "small") == small.weights(folder / "2" / "small")


@pytest.mark.parametrize(
    "name", ["2_1", "2_4", "1_2", "together_1", "2_4_together", "2_4_replicas", "replicas_4", "replicas_1"]
)
def test_resuming_with_another_number_of_processes_gives_the_same_numbers(regrouped, name):
    same_weights(*(regrouped / run / "small" / "model" / "model.safetensors" for run in (name, "1")))
    steps = [line["step"] for line in small.metrics(regrouped / name / "small") if line["kind"] == "train"]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_if_one_process_is_killed_the_others_stop_and_the_run_resumes(runs):
    folder, killed = runs
    assert killed == [[1, -1]]  # the remaining process ends with an error, the killed one without output
    assert "with --resume" in (folder / "log-0.txt").read_text()
    assert small.weights(folder / "2_killed_2" / "small") == small.weights(folder / "2" / "small")
