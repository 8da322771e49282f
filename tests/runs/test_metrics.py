import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.errors import InputError, RunError
from posttrain.runs import sinks
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import MetricsLog, read_metrics


def steps(path: Path) -> list[int]:
    return [line["step"] for line in read_metrics(path)]


def test_each_call_is_one_line_on_the_disk_at_once(run: RunDirectory) -> None:
    log = MetricsLog(run, [])
    values = {"loss/policy": np.float32(0.5), "tokens": torch.tensor(3), "note": "é\ud800", "list": (1, 2.0)}
    log.write(1, "train", values)
    assert run.metrics.read_bytes().count(b"\n") == 1
    (line,) = read_metrics(run.metrics)
    assert line.pop("time/run") >= 0
    plain = {"loss/policy": 0.5, "tokens": 3, "note": "é\ud800", "list": [1, 2.0]}
    assert line == {"step": 1, "kind": "train", **plain}
    log.close()
    log.close()


def test_not_finite_values_are_null_and_named(run: RunDirectory) -> None:
    with MetricsLog(run, []) as log:
        log.write(2, "train", {"a": math.nan, "b": [1.0, -math.inf], "c": np.float32("inf"), "d": 1.0, "e": None})

    def refuse(text: str) -> None:
        raise AssertionError(text)

    line = json.loads(run.metrics.read_text(), parse_constant=refuse)
    assert (line["a"], line["b"], line["c"], line["d"], line["e"]) == (None, [1.0, None], None, 1.0, None)
    assert line["nonfinite"] == ["a", "b", "c"]


def test_the_log_keeps_its_own_keys(run: RunDirectory) -> None:
    with MetricsLog(run, []) as log:
        with pytest.raises(ValueError, match="kind"):
            log.write(1, "train", {"kind": 1.0})
        with pytest.raises(ValueError, match="'x' is a dict"):
            log.write(1, "train", {"x": {}})
    assert read_metrics(run.metrics) == []


def test_truncation_drops_later_steps_and_continues(run: RunDirectory) -> None:
    with MetricsLog(run, []) as log:
        for step in range(5):
            log.write(step, "train", {"x": step / 3})
        before = run.metrics.read_bytes().splitlines()
        log.truncate_after(2)
        assert run.metrics.read_bytes().splitlines() == before[:3]
        log.write(3, "train", {})
    assert steps(run.metrics) == [0, 1, 2, 3]


@pytest.mark.parametrize("torn", [b'{"step": 2, "ki', b'{"step": 2, "kind": "train"}', b"\xc3"])
def test_a_line_torn_by_a_kill_is_dropped(run: RunDirectory, torn: bytes) -> None:
    with MetricsLog(run, []) as log:
        log.write(1, "train", {})
    with open(run.metrics, "ab") as file:
        file.write(torn)
    assert steps(run.metrics) == [1]
    with MetricsLog(run, []) as log:
        log.truncate_after(1)
        log.write(2, "train", {})
    assert steps(run.metrics) == [1, 2]


def test_a_damaged_line_in_the_middle_is_named(run: RunDirectory) -> None:
    run.metrics.write_text('{"step": 1, "kind": "train"}\nrubbish\n{"step": 2, "kind": "train"}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2"):
        read_metrics(run.metrics)


def test_the_time_limit_counts_across_a_resume(run: RunDirectory) -> None:
    run.metrics.write_text('{"step": 1, "kind": "train", "time/run": 100.0}\n')
    with MetricsLog(run, []) as log:
        log.write(2, "train", {})
    assert 100.0 <= read_metrics(run.metrics)[-1]["time/run"] < 160.0


def test_a_full_disk_is_reported_and_leaves_whole_lines(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MetricsLog(run, [])
    log.write(1, "train", {})
    pwrite = os.pwrite

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        pwrite(descriptor, data[:7], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RunError, match=r"metrics\.jsonl.*disk is full"):
        log.write(2, "train", {})
    assert run.metrics.read_bytes().endswith(b"\n")
    assert steps(run.metrics) == [1]


class Recorder:
    """A sink that fails from its n-th write on."""

    def __init__(self, fails_at: int) -> None:
        self.fails_at = fails_at
        self.calls: list[Any] = []

    def write(self, step: int, values: Any) -> None:
        self.calls.append((step, dict(values)))
        if len(self.calls) >= self.fails_at:
            raise ConnectionError("the service is away, api_key=0123456789abcdef")

    def completions(self, step: int, rows: Any) -> None:
        raise NotImplementedError

    def rewind(self, step: int) -> bool:
        self.calls.append(("rewind", step))
        return False

    def close(self) -> None:
        self.calls.append("close")


def test_a_failing_sink_is_reported_once_and_dropped(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = Recorder(fails_at=2), Recorder(fails_at=99)
    monkeypatch.setitem(sinks._SINKS, "wandb", lambda run: bad)
    monkeypatch.setitem(sinks._SINKS, "trackio", lambda run: good)
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
    assert [call[0] for call in good.calls if call != "close" and call[1] == {"train/x": 1.0}] == [1, 2, 3, 4]
    assert good.calls[-1] == "close"


def test_a_sink_that_cannot_start_or_stop_is_dropped_too(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(run: RunDirectory) -> sinks.Sink:
        raise OSError("not logged in")

    class Stuck(Recorder):
        def close(self) -> None:
            raise RuntimeError("cannot send")

    monkeypatch.setitem(sinks._SINKS, "wandb", start)
    monkeypatch.setitem(sinks._SINKS, "trackio", lambda run: Stuck(99))
    with MetricsLog(run, ["wandb", "trackio"]) as log:
        log.write(1, "train", {"x": 1.0})
    assert [line["kind"] for line in read_metrics(run.metrics)] == ["warning", "train", "warning"]
    assert "not logged in" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_a_sink_that_is_not_installed_is_an_input_error(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(InputError, match=rf"pip install 'posttrain\[{name}\]'"):
        MetricsLog(run, [name])


def test_rewinding_reaches_the_sinks(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Recorder(99)
    monkeypatch.setitem(sinks._SINKS, "wandb", lambda run: sink)
    with MetricsLog(run, ["wandb"]) as log:
        log.write(1, "train", {"x": math.nan, "y": 2.0})
        log.truncate_after(0)
    assert sink.calls == [(1, {"train/y": 2.0}), ("rewind", 0), "close"]
