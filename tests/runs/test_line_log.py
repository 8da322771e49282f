"""The append-only log of lines: whole lines, whatever ends the process, and lines of others."""

import os
import subprocess
import sys
import time

import pytest

from posttrain.errors import RunError
from posttrain.runs.directory import LineLog

LINE = b'{"a": 1}\n'


@pytest.mark.parametrize("torn", [b"", b"{", LINE[:-1], b"x" * 200_000])
def test_an_incomplete_last_line_is_skipped_and_cut(tmp_path, torn):
    path = tmp_path / "log"
    for whole in (3, 0):
        path.write_bytes(LINE * whole + torn)
        with LineLog(path) as log:
            assert [end for end, _ in log.lines()] == [9, 18, 27][:whole]
            assert [line for _, line in log.lines(9)] == [LINE] * max(whole - 1, 0)
            log.cut()
            assert log.size == 9 * whole
            assert log.append(b"last\n") == 9 * whole + 5
            assert log.read(9 * whole, log.size) == b"last\n"
            log.truncate(9 * whole)
        assert path.read_bytes() == LINE * whole


def test_replaced_lines_are_followed_by_new_ones_and_links_by_nothing(tmp_path):
    with LineLog(tmp_path / "log") as log:
        log.append(b"1\n")
        log.replace([b"2\n", b"3\n"])
        log.append(b"4\n")
    assert (tmp_path / "log").read_bytes() == b"2\n3\n4\n"
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="link"):
        LineLog(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(("seconds", "expected"), [(0, [1, 2, 3]), (3600, [0, 0, 1]), (None, [0, 0, 1])])
def test_lines_are_synced_as_asked(tmp_path, monkeypatch, seconds, expected):
    synced, counts = [], []
    log = LineLog(tmp_path / "log", sync_seconds=seconds)
    monkeypatch.setattr(os, "fsync", synced.append)
    for number in range(3):
        log.append(b"x\n", sync=number == 2)
        counts.append(len(synced))
    assert counts == expected
    log.close()
    assert len(synced) == counts[-1] + (seconds is not None)
    log.close()


def test_a_killed_writer_leaves_whole_lines(tmp_path):
    path = tmp_path / "log"
    code = (
        "import sys; from pathlib import Path; from posttrain.runs.directory import LineLog\n"
        f"log = LineLog(Path({str(path)!r}))\n"
        "while True: log.append(b'z' * 5000 + b'\\n')"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as writer:
        while not path.exists() or path.stat().st_size < 1 << 20:
            time.sleep(0.01)
        writer.kill()
    with LineLog(path) as log:
        log.cut()
        lines = [line for _, line in log.lines()]
        assert len(lines) > 200
        assert set(lines) == {b"z" * 5000 + b"\n"}
