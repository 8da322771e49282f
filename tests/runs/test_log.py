"""Logs as columns: whichever way a chunk is parsed, the numbers and the refusals are those of `read_metrics`."""

import json
import math

import numpy as np
import pytest

from posttrain.errors import RunError
from posttrain.runs.log import Log, progress_of, read_log
from posttrain.runs.metrics import MOST_KEYS, read_metrics

MANY = 3000


def written(tmp_path, changed=None, count=MANY):
    """A log of `count` steps with an evaluation each hundred; `changed`: step -> line in its place."""
    lines = []
    for step in range(1, count + 1):
        line = {
            "step": step,
            "kind": "train",
            "time/run": 0.5 * step,
            "loss/policy": math.sin(step),
            "rollout/failed": 0,
        }
        if step % 7 == 0:
            line["policy/kl"] = step / 3
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
        '{"step": 2500, "kind": "train", "loss/policy": null, "nonfinite": ["loss/policy"]}',
        '{"step": 2500, "kind": "train", "loss/policy": 7, "flag": true}',
        '{"step": 2500, "kind": "train", "loss/policy": 1e300, "large": 123456789012345678901234567890}',
        '{"step": 2500, "kind": "train", "loss/policy": 1.0, "note": "a text"}',
        '{"step": 2500, "kind": "train", "loss/policy": 1.0, "loss/policy": 2.0}',
        '{"kind": "train", "loss/policy": 1.0, "step": 2500}',
        '{"step": 2500, "kind":"train", "quoted \\" key": 1.0}',
    ],
)
def test_long_logs_have_the_numbers_of_their_lines(tmp_path, line):
    path = written(tmp_path, {2500: line})
    log, plain = read_log(path), Log(read_metrics(path))
    assert_equal(log, plain)
    assert len(log.steps) == MANY
    assert len(log.trained("policy/kl")[0]) in (MANY // 7, MANY // 7 - 1)
    assert progress_of(path) == (MANY, True)


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 2500, "kind": "train", "loss/policy": NaN}',
        '{"step": 2500, "kind": "train", "loss/policy": 1e999}',
        '{"step": 2500, "kind": "train", "loss/policy": {"a": 1}}',
        '{"step": 2500, "kind": "train", "loss/policy": "text"}',
        f'{{"step": 2500, "kind": "train", "loss/policy": {"9" * 400}}}',
        '{"step": -1, "kind": "train", "loss/policy": 1}',
        '{"step": 2.5, "kind": "train", "loss/policy": 1}',
        '{"step": 2500, "kind": "train", "loss/policy": 1} {"step": 2500, "kind": "train"}',
        '{"step": 2500, "kind": "train", "loss/policy": 1',
        "[]",
    ],
)
def test_damaged_lines_are_refused_with_their_number(tmp_path, line):
    path = written(tmp_path, {2500: line})
    with pytest.raises(RunError) as slow:
        read_metrics(path)
    with pytest.raises(RunError) as fast:
        read_log(path)
    assert str(fast.value) == str(slow.value)
    assert f"line {2500 + 24}" in str(fast.value)


def test_a_log_grows_and_is_cut_without_changing_the_one_before(tmp_path):
    path = written(tmp_path, count=5)
    log = read_log(path)
    longer = log.extended([b'{"step": 6, "kind": "train", "loss/policy": 2.0, "new": 1.0}'])
    assert (log.last_step, longer.last_step, bool(Log())) == (5, 6, False)
    assert [column.tolist() for column in longer.trained("new")] == [[6], [1.0]]
    assert_equal(
        longer.until(5), Log(read_metrics(path)).extended([b'{"step": 6, "kind": "train", "new": 1}']).until(5)
    )
    assert longer.until(3).total("loss/policy") == pytest.approx(sum(map(math.sin, (1, 2, 3))))


def test_a_log_with_very_many_metrics_is_refused(tmp_path):
    wide = {f"m{n}": 1.0 for n in range(MOST_KEYS)}
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps({"step": 1, "kind": "evaluation", **wide}) + "\n")
    with pytest.raises(RunError, match="keys, more than"):
        read_log(file)
    lines = [{"step": n, "kind": "train", **{f"m{n}_{k}": 1.0 for k in range(900)}} for n in range(12)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RunError, match="at most 10,000"):
        read_log(file)
