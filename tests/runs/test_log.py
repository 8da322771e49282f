"""Logs as columns: the numbers and the refusals are those of `read_metrics`."""

import json
import math

import numpy as np
import pytest

from posttrain.errors import RunError
from posttrain.runs import log as module
from posttrain.runs.log import Log, progress_of, read_log
from posttrain.runs.metrics import MOST_KEYS, read_metrics


def written(tmp_path, changed=None, count=300):
    """A log of `count` steps with an evaluation each hundred; `changed`: step -> line in its place."""
    lines = []
    for step in range(1, count + 1):
        line = {"step": step, "kind": "train", "time/run": 0.5 * step, "loss/policy": math.sin(step)}
        line |= {"rollout/failed": 0} | ({"policy/kl": step / 3} if step % 7 == 0 else {})
        lines.append((changed or {}).get(step) or json.dumps(line))
        if step % 100 == 0:
            lines.append(json.dumps({"step": step, "kind": "evaluation", "success": 0.5, "n": 8}))
    lines.append(json.dumps({"step": count, "kind": "final", "policy": "trained", "success": 0.5}))
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines) + '{"step": 9, "ki')
    return path


def assert_equal(log, other):
    assert list(log) == list(other)
    assert log.nonfinite == other.nonfinite
    np.testing.assert_array_equal(log.steps, other.steps)
    assert set(log.columns) == set(other.columns)
    for key, values in other.columns.items():
        np.testing.assert_array_equal(log.columns[key], values)


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 250, "kind": "train", "loss/policy": null, "nonfinite": ["loss/policy"]}',
        '{"step": 250, "kind": "train", "loss/policy": 1e300, "large": 123456789012345678901234567890, "flag": true}',
        '{"step": 250, "kind": "train", "loss/policy": 1.0, "note": "a text"}',
        '{"kind":"train", "loss/policy": 1.0, "loss/policy": 2.0, "quoted \\" key": 1.0, "step": 250}',
    ],
)
def test_logs_that_are_read_in_parts_have_the_numbers_of_their_lines(tmp_path, line, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 64)
    path = written(tmp_path, {250: line})
    log = read_log(path)
    assert_equal(log, Log(read_metrics(path)))
    assert len(log.steps) == 300
    assert len(log.trained("policy/kl")[0]) == 300 // 7
    assert progress_of(path) == (300, True)


@pytest.mark.parametrize(
    "line",
    [
        *(
            f'{{"step": 250, "kind": "train", "loss/policy": {bad}}}'
            for bad in ("NaN", "1e999", '{"a": 1}', '"text"', "9" * 400)
        ),
        '{"step": -1, "kind": "train", "loss/policy": 1}',
        '{"step": 2.5, "kind": "train", "loss/policy": 1}',
        '{"step": 250, "kind": "train", "loss/policy": 1} {"step": 250, "kind": "train"}',
        '{"step": 250, "kind": "train", "loss/policy": 1',
        "[]",
    ],
)
def test_damaged_lines_are_refused_with_their_number(tmp_path, line):
    path = written(tmp_path, {250: line})
    for read in (read_metrics, read_log):
        with pytest.raises(RunError, match=f"line {250 + 2} is damaged"):
            read(path)


def test_a_log_grows_and_is_cut_without_changing_the_one_before(tmp_path):
    path = written(tmp_path, count=5)
    log = read_log(path)
    longer = log.extended([b'{"step": 6, "kind": "train", "loss/policy": 2.0, "new": 1.0}'])
    assert (log.last_step, longer.last_step, bool(Log())) == (5, 6, False)
    assert [column.tolist() for column in longer.trained("new")] == [[6], [1.0]]
    again = Log(read_metrics(path)).extended([b'{"step": 6, "kind": "train", "new": 1}'])
    assert_equal(longer.until(5), again.until(5))
    assert longer.until(3).total("loss/policy") == pytest.approx(sum(map(math.sin, (1, 2, 3))))


def test_a_log_with_very_many_metrics_is_refused(tmp_path):
    file = tmp_path / "metrics.jsonl"
    wide = {"step": 1, "kind": "evaluation", **{f"m{n}": 1.0 for n in range(MOST_KEYS)}}
    lines = [{"step": n, "kind": "train", **{f"m{n}_{k}": 1.0 for k in range(900)}} for n in range(12)]
    for content, message in (([wide], "keys, more than"), (lines, "at most 10,000")):
        file.write_text("".join(json.dumps(line) + "\n" for line in content))
        with pytest.raises(RunError, match=message):
            read_log(file)
