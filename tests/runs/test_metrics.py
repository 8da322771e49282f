import errno
import json
import math
import os
import sys

import numpy as np
import pytest
import torch

from posttrain.errors import InputError, RunError
from posttrain.runs import sinks
from posttrain.runs.metrics import MetricsLog, read_metrics


def steps(path):
    return [line["step"] for line in read_metrics(path)]


def kinds(run):
    return [line["kind"] for line in read_metrics(run.metrics)]


def test_each_call_is_one_line_on_the_disk_at_once(run):
    log = MetricsLog(run, [])
    values = {"loss/policy": np.float32(0.5), "tokens": torch.tensor(3), "note": "é\ud800", "list": (1, 2.0)}
    log.write(1, "train", values)
    assert run.metrics.read_bytes().count(b"\n") == 1
    (line,) = read_metrics(run.metrics)
    assert line.pop("time/run") >= 0
    assert line == {"step": 1, "kind": "train", "loss/policy": 0.5, "tokens": 3, "note": "é\ud800", "list": [1, 2.0]}
    for values, message in (({"kind": 1.0}, "kind"), ({"x": {}}, "'x' is a dict")):
        with pytest.raises(ValueError, match=message):
            log.write(1, "train", values)
    assert len(read_metrics(run.metrics)) == 1
    log.close()
    log.close()


def test_not_finite_values_are_null_and_named(run):
    with MetricsLog(run, []) as log:
        log.write(2, "train", {"a": math.nan, "b": [1.0, -math.inf], "c": np.float32("inf"), "d": 1.0, "e": None})

    def refuse(text):
        raise AssertionError(text)

    line = json.loads(run.metrics.read_text(), parse_constant=refuse)
    assert [line[key] for key in "abcde"] == [None, [1.0, None], None, 1.0, None]
    assert line["nonfinite"] == ["a", "b", "c"]


def test_truncation_drops_later_steps_and_continues(run):
    with MetricsLog(run, []) as log:
        for step in range(5):
            log.write(step, "train", {"x": step / 3})
        before = run.metrics.read_bytes().splitlines()
        log.truncate_after(2)
        assert run.metrics.read_bytes().splitlines() == before[:3]
        log.write(3, "train", {})
    assert steps(run.metrics) == [0, 1, 2, 3]


@pytest.mark.parametrize("torn", [b'{"step": 2, "ki', b'{"step": 2, "kind": "train"}', b"\xc3"])
def test_a_line_torn_by_a_kill_is_dropped_and_time_counts_across_a_resume(run, torn):
    run.metrics.write_bytes(b'{"step": 1, "kind": "train", "time/run": 100.0}\n' + torn)
    assert steps(run.metrics) == [1]
    with MetricsLog(run, []) as log:
        log.truncate_after(1)
        log.write(2, "train", {})
    assert steps(run.metrics) == [1, 2]
    assert 100.0 <= read_metrics(run.metrics)[-1]["time/run"] < 160.0


def test_a_full_disk_is_reported_and_leaves_whole_lines(run, monkeypatch):
    log = MetricsLog(run, [])
    log.write(1, "train", {})
    pwrite = os.pwrite

    def full(descriptor, data, offset):
        pwrite(descriptor, data[:7], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RunError, match=r"metrics\.jsonl.*disk is full"):
        log.write(2, "train", {})
    assert run.metrics.read_bytes().endswith(b"\n")
    assert steps(run.metrics) == [1]


class Recorder:
    """A sink that fails from its n-th write on."""

    def __init__(self, fails_at=99, stuck=False):
        self.fails_at, self.stuck, self.calls = fails_at, stuck, []

    def write(self, step, values):
        self.calls.append((step, dict(values)))
        if len(self.calls) >= self.fails_at:
            raise ConnectionError("the service is away, api_key=0123456789abcdef")

    def rewind(self, step):
        self.calls.append(("rewind", step))
        return False

    def close(self):
        self.calls.append("close")
        if self.stuck:
            raise RuntimeError("cannot send")


@pytest.fixture
def use(monkeypatch):
    """Replaces sinks by name."""
    return lambda **given: [monkeypatch.setitem(sinks.SINKS, name, lambda run, s=s: s) for name, s in given.items()]


def test_a_failing_sink_is_reported_once_and_dropped(run, use, capsys):
    bad, good = Recorder(fails_at=2), Recorder()
    use(wandb=bad, trackio=good)
    with MetricsLog(run, ["wandb", "trackio"]) as log:
        for step in range(1, 5):
            log.write(step, "train", {"x": 1.0})
    assert [line["step"] for line in read_metrics(run.metrics) if line["kind"] == "train"] == [1, 2, 3, 4]
    (warning,) = [line for line in read_metrics(run.metrics) if line["kind"] == "warning"]
    assert warning["sink"] == "wandb"
    assert "the service is away" in warning["message"]
    assert "0123456789abcdef" not in warning["message"]
    assert capsys.readouterr().err.count("wandb") == 1
    assert len(bad.calls) == 2
    assert good.calls == [*((step, {"train/x": 1.0}) for step in range(1, 5)), "close"]


def test_a_sink_that_cannot_start_or_stop_is_dropped_too(run, use, monkeypatch, capsys):
    def start(run):
        raise OSError("not logged in")

    use(trackio=Recorder(stuck=True))
    monkeypatch.setitem(sinks.SINKS, "wandb", start)
    with MetricsLog(run, ["wandb", "trackio"]) as log:
        log.write(1, "train", {"x": 1.0})
    assert kinds(run) == ["warning", "train", "warning"]
    assert "not logged in" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_a_sink_that_is_not_installed_is_an_input_error(run, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=rf"pip install 'posttrain\[{name}\]'"):
        MetricsLog(run, [name])


def test_rewinding_reaches_the_sinks(run, use):
    sink = Recorder()
    use(wandb=sink)
    with MetricsLog(run, ["wandb"]) as log:
        log.write(1, "train", {"x": math.nan, "y": 2.0})
        log.truncate_after(0)
    assert sink.calls == [(1, {"train/y": 2.0}), ("rewind", 0), "close"]


def test_a_damaged_record_of_what_was_sent_drops_the_sinks(run, use, capsys):
    use(wandb=Recorder())
    (run.logs / "sinks.json").write_text("[]")
    with MetricsLog(run, ["wandb"]) as log:
        log.write(1, "train", {"x": 2.0})
    assert "sinks.json is damaged" in capsys.readouterr().err
    assert kinds(run) == ["warning", "train"]
