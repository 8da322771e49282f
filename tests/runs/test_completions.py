"""The journal of a generation: which files it may replace, and concurrent generations."""

import json
import threading
import time

import pytest

from posttrain.errors import RunError
from posttrain.runs import completions
from posttrain.runs.completions import CompletionLog, line_of

KEYS = [(n, 0) for n in range(4)]


def answered(folder, text, keys=KEYS, replaces=None):
    log = CompletionLog(folder / "completions.jsonl", {"recipe": "r", "data": "d"}, replaces)
    for row, sample in keys:
        if (row, sample) not in log:
            log.append((row, sample), {"id": row, "sample": sample, "prediction": f"{text} {row}"})
    return log


def texts(path):
    return [json.loads(line)["prediction"] for line in path.read_text().splitlines()]


def test_only_lines_of_the_log_are_replaced(tmp_path):
    out = tmp_path / "deep/p.jsonl"
    with answered(tmp_path / "a", "mine") as log:
        assert log.publish(out, KEYS[:2]) == 2
        assert log.publish(out, reversed(KEYS)) == 4, "more of its own"
        assert texts(out) == ["mine 3", "mine 2", "mine 1", "mine 0"]
        foreign = [b"mine", b"[1]\n", b'{"id": [0], "sample": 0}\n', line_of({"id": 9, "sample": 0})]
        foreign += [out.read_bytes()[:-1]]
        foreign += [out.read_bytes() + line_of({"id": 0, "sample": 0, "prediction": "theirs 0"})]
        for content in foreign:
            out.write_bytes(content)
            with pytest.raises(RunError, match=r"deep/p\.jsonl has lines that this run did not write"):
                log.publish(out, KEYS)
            assert out.read_bytes() == content
        assert log.publish(out, KEYS, overwrite=True) == 4
        assert texts(out)[0] == "mine 0"


def test_only_the_file_of_a_killed_run_may_be_replaced(tmp_path):
    out = tmp_path / "p.jsonl"
    out.write_text("old")
    with answered(tmp_path / "a", "mine", KEYS[:1], replaces=out):
        pass
    with answered(tmp_path / "a", "mine") as log:
        out.write_text("another")
        with pytest.raises(RunError):
            log.publish(out, KEYS)
        out.write_text("old")
        assert log.publish(out, KEYS) == 4


def test_of_two_concurrent_writers_one_gets_an_error(tmp_path, monkeypatch):
    whole, out, errors, both = completions.write_lines, tmp_path / "p.jsonl", {}, threading.Barrier(2)

    def slowly(path, lines):
        time.sleep(0.3)
        whole(path, lines)

    def publish(name):
        with answered(tmp_path / name, name) as log:
            both.wait()
            try:
                log.publish(out, KEYS)
            except RunError as error:
                errors[name] = str(error)

    monkeypatch.setattr(completions, "write_lines", slowly)
    running = [threading.Thread(target=publish, args=(name,)) for name in ("one", "two")]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    (loser,) = errors
    winner = "two" if loser == "one" else "one"
    assert texts(out) == [f"{winner} {n}" for n in range(4)]
    assert f"{loser}/completions.jsonl" in errors[loser]
