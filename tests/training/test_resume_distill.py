"""Law 10 for distillation: a run killed at any instant resumes to the same bits, steps on fixed rows included."""

import json

import pytest

from . import small
from .test_distill import teacher_model, values_of  # noqa: F401

PLACES = {
    "teacher": ("posttrain.training.teacher:ModelScorer.score", 3),
    "optimizer": ("posttrain.training.updater:Optimizer.step", 5),
    "rename": ("pathlib:Path.rename", 4),
}


def recipe(tiny, teacher, runs):
    rows = runs / "rows.jsonl"
    answers = [json.dumps({"prompt": f"Task {n}", "completion": "row column"}) for n in range(6)]
    rows.write_text("\n".join(answers))
    off = {
        "data": {"train": str(rows), "cache": str(runs / "cache"), "max_tokens": 100},
        "share": 0.5,
        "rows_per_step": 4,
    }
    loss = {"type": "jsd", "beta": 0.5, "top_k": 9}
    return values_of(tiny, runs, {"path": str(teacher)}, loss=loss, off_policy=off, steps=5)


@pytest.fixture(scope="module")
def uninterrupted(tiny_model, teacher_model, tmp_path_factory):  # noqa: F811
    runs = tmp_path_factory.mktemp("whole")
    assert small.run(recipe(tiny_model, teacher_model, runs)) == 0, (runs / "log.txt").read_text()
    return runs / "small"


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=[] if place == "teacher" else pytest.mark.slow) for place in PLACES]
)
def test_it_resumes_to_the_same_bits_after_a_kill_there(place, tiny_model, teacher_model, tmp_path, uninterrupted):  # noqa: F811
    values = recipe(tiny_model, teacher_model, tmp_path)
    assert small.run(values, die_at=PLACES[place]) == -9
    assert small.run(values, resume=True) == 0, (tmp_path / "log.txt").read_text()
    run = tmp_path / "small"
    small.assert_same(run, uninterrupted)
    lines = [line for line in small.metrics(run) if line["kind"] == "train"]
    assert {"teacher/off_policy" in line for line in lines} == {True, False}
