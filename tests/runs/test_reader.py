"""Reading the files of a run that comes from someone else."""

import json
import os
import resource
from pathlib import Path

import pytest

from posttrain.errors import InputError, PosttrainError
from posttrain.runs.directory import RunDirectory, process_runs
from posttrain.runs.metrics import MetricsLog, parse_line, read_metrics
from posttrain.runs.reader import is_file, open_file, parse_json, read_json, read_text
from posttrain.runs.storage import runs_in, usage_of
from tests.runs.comparing import make_run


def test_only_regular_files_below_the_run_are_read(tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    (run / "inner").mkdir(parents=True)
    outside.mkdir()
    (outside / "file").write_text("outside")
    (run / "inner" / "file").write_text("inside")
    (run / "linked").symlink_to(outside)
    (run / "link").symlink_to(outside / "file")
    (run / "loop").symlink_to("loop")
    os.mkfifo(run / "pipe")
    (run / "device").symlink_to("/dev/zero")
    assert read_text(run / "inner" / "file", run=run) == "inside"
    refused = (
        "link",
        "loop",
        "pipe",
        "device",
        "inner",
        "linked/file",
        "inner/../../outside/file",
        "inner/file/x",
        "a\0b",
    )
    for name in refused:
        with pytest.raises(InputError, match="cannot be read"):
            open_file(run / name, run)
    assert [name for name in refused if is_file(run / name) and "/" not in name] == []
    with pytest.raises(FileNotFoundError):
        open_file(run / "nothing", run)
    (tmp_path / "runs").symlink_to(run)
    # The run itself may be a link.
    assert read_text(tmp_path / "runs" / "inner" / "file", run=tmp_path / "runs") == "inside"


def test_large_files_cost_no_memory(tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for size in (17 << 20, 900 << 20, 8 << 30):
        file = tmp_path / "metrics.jsonl"
        file.touch()
        os.truncate(file, size)
        for read in (read_text, read_json, read_metrics):
            with pytest.raises(InputError, match=r"larger than|longer than"):
                read(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # kB


def test_numbers_are_finite_and_bounded():
    assert parse_json(b"[1e300, -4, 12345678901234567890]", finite=True) == [1e300, -4, 12345678901234567890]
    assert parse_json(b"NaN") != parse_json(b"NaN"), "the limits of an unknown interval"
    for text in (b"NaN", b"-Infinity", b"1e999", b"-1E+400", b"9" * 400, b"[" * 200_000, b"{", b"\xff"):
        with pytest.raises(ValueError):
            parse_json(text, finite=True)


@pytest.mark.parametrize(
    "change",
    [
        *({"step": value} for value in (True, -1, 1.0, "1", None, 10**30)),
        *({"kind": 1}, {"x": {}}, {"x": [{}]}, {"time/run": "x"}, {"n": [1]}, {"optimizer/skipped": "x"}),
    ],
)
def test_lines_of_other_types_are_damaged(change):
    line = {"step": 1, "kind": "train", "rollout/return": 0.5, "nonfinite": ["a"], "policy": "x", "best_step": None}
    assert parse_line(json.dumps(line).encode()) == line
    with pytest.raises(ValueError):
        parse_line(json.dumps(line | change).encode())


def test_process_ids_out_of_range_are_of_no_process(tmp_path):
    run = RunDirectory(make_run(tmp_path, "run"))
    assert process_runs(os.getpid())
    for pid in ("9" * 30, "-1", "0", "x", str(1 << 31)):
        (run.path / ".lock").write_text(pid)
        assert not run.is_running()
    (run.path / f".x.{'9' * 30}.partial").touch()
    with run.lock():
        assert run.is_running()
    assert not list(run.path.glob(".*.partial"))


def test_a_resumed_run_writes_nothing_outside(tmp_path):
    run, target = RunDirectory(make_run(tmp_path, "run")), tmp_path / "target"
    target.write_text("mine\n")
    for name in (".lock", "metrics.jsonl"):
        kept = (run.path / name).read_bytes() if (run.path / name).exists() else b""
        (run.path / name).unlink(missing_ok=True)
        (run.path / name).symlink_to(target)
        with pytest.raises(PosttrainError), run.lock(), MetricsLog(run, []):
            pass
        (run.path / name).unlink()
        (run.path / name).write_bytes(kept)
    assert target.read_text() == "mine\n"
    (run.path / "normalizer").symlink_to(tmp_path)
    with pytest.raises(InputError, match="normalizer is a link"):
        RunDirectory.open(run.path)
    (run.path / "normalizer").unlink()
    run.plots.rmdir()
    run.plots.symlink_to(tmp_path)
    with pytest.raises(InputError, match="plots is a link"):
        RunDirectory.open(run.path)


def test_a_bad_run_is_a_row_and_the_others_are_listed(tmp_path):
    for name in ("bad", "good"):
        make_run(tmp_path, name)
    with (tmp_path / "bad" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "kind": "train", "loss/nll": %s}\n' % ("9" * 400))
    problems = {run.path.name: usage_of(run).problem for run in runs_in(tmp_path)}
    assert "number of 400 digits" in problems["bad"]
    assert problems["good"] == ""


def test_files_that_vanish_or_change_meanwhile_are_an_error_or_a_result(tmp_path, monkeypatch):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "kind": "train"}\n' * 3)
    with open_file(file) as opened:
        file.unlink()
        assert len(opened.read()) == 87
    assert read_metrics(file) == []
    file.write_text("x" * (5 << 20))
    with pytest.raises(InputError, match="longer than 4 MiB"):
        read_metrics(Path(file))
