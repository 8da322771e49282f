"""Checkpoints that threads of several processes write, and the 8-bit state of an optimizer that they divide."""

import shutil

import pytest

from posttrain.distributed.tensors import read_all
from tests.training import preferences, small

from . import together
from .test_parity import models  # noqa: F401

pytestmark = pytest.mark.slow


def values(tiny, folder, **changes):
    """Four updates, saved after each."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install posttrain[cuda]")
    folder.mkdir(parents=True, exist_ok=True)
    optimizer = {"learning_rate": 3e-3, "type": "adamw_8bit"}
    given = {"steps": 4, "rows_per_update": 5, "optimizer": optimizer, "evaluation": {"every": 0}} | changes
    made = preferences.recipe_values("sft", tiny, folder, **given)
    made["checkpoint"] = made["checkpoint"] | {"asynchronous": True}
    return made


def test_processes_resume_to_the_same_bits_and_others_are_refused(models, tmp_path):  # noqa: F811
    log = tmp_path / "log-0.txt"
    jobs = [{"values": values(models, tmp_path / name, **steps)} for name, steps in (("2", {}), ("2_2", {"steps": 2}))]
    assert together.run(2, jobs, tmp_path) == [[0, 0]] * 2, log.read_text()[-3000:]
    shutil.copytree(tmp_path / "2_2", tmp_path / "2_1")
    dies = (0, "posttrain.training.checkpoint:Checkpoints._seal", 2)
    killed = together.run(2, [{"values": values(models, tmp_path / "killed"), "die": dies}], tmp_path)
    assert killed[0][0] == -1
    again = [{"values": values(models, tmp_path / name), "resume": True} for name in ("2_2", "killed")]
    assert together.run(2, again, tmp_path) == [[0, 0]] * 2, log.read_text()[-3000:]
    whole = small.weights(tmp_path / "2" / "small")
    assert small.weights(tmp_path / "2_2" / "small") == whole
    assert small.weights(tmp_path / "killed" / "small") == whole
    (last,) = sorted((tmp_path / "2" / "small" / "checkpoints").glob("step_*"))[-1:]
    names = [name for name in read_all(last / "tensors") if "/state1/" in name]
    assert {name.rpartition("/")[2] for name in names} == {"0 of 2", "1 of 2"}
    one = together.run(1, [{"values": values(models, tmp_path / "2_1"), "resume": True}], tmp_path)
    assert one == [[2]]
    assert "8-bit optimizer state of 2 processes" in log.read_text()
