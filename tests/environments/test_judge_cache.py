"""The cache of judges: no request is sent twice, and a killed process loses or damages no reply."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.environments.judge import JudgeCache, judge_cache, request_key
from posttrain.errors import InputError

_WRITER = """
import sys
from pathlib import Path
from posttrain.environments.judge import JudgeCache
cache, name, count = JudgeCache(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
for number in range(count):
    print(number, cache.reply(f"key {number}", lambda: f"{name} {number} " + "é" * 500), flush=True)
"""


def _never():
    raise AssertionError("asked again")


def _writer(path, name, count):
    return subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(path), name, str(count)], stdout=subprocess.PIPE, text=True
    )


def test_cached_requests_are_not_repeated_and_failures_not_cached(tmp_path):
    path = tmp_path / "deep" / "cache.jsonl"
    first = JudgeCache(path)
    assert first.reply("a", lambda: "1\n{}") == first.reply("a", _never) == "1\n{}"
    assert first.reply("b", lambda: "2") == "2"
    assert (first.hits, first.misses, len(first)) == (1, 2, 2)
    again = JudgeCache(path)
    assert [again.reply(key, _never) for key in "ab"] == ["1\n{}", "2"]
    assert (again.hits, again.misses) == (2, 0)
    cache = JudgeCache(tmp_path / "cache")

    def fail():
        raise OSError("down")

    for _ in range(2):
        with pytest.raises(OSError, match="down"):
            cache.reply("a", fail)
    assert cache.reply("a", lambda: "1") == "1"
    assert (cache.hits, cache.misses, len(cache)) == (0, 3, 1)


@pytest.mark.parametrize("cut", [1, 5, 20, 40])
def test_only_a_truncated_line_is_dropped(tmp_path, cut):
    path = tmp_path / "cache"
    cache = JudgeCache(path)
    for key in "abc":
        cache.reply(key, lambda key=key: f"reply to {key} é")
    path.write_bytes(path.read_bytes()[:-cut])
    mended = JudgeCache(path)
    assert len(mended) == 2
    assert mended.reply("d", lambda: "4") == "4"
    asked = []
    assert JudgeCache(path).reply("c", lambda: asked.append(1) or "3") == ("reply to c é" if cut == 1 else "3")
    assert len(asked) == (cut != 1)
    assert [JudgeCache(path).reply(key, _never) for key in "abd"] == ["reply to a é", "reply to b é", "4"]


def test_lines_that_are_not_replies_are_skipped_or_replaced(tmp_path):
    path = tmp_path / "cache"
    path.write_bytes(b'[]\n1\n{"key": 1, "reply": "x"}\n\xff\n\n{"key": "a"}\n{"key": "a", "reply": "1"}\n')
    assert JudgeCache(path).reply("a", _never) == "1"
    path = tmp_path / "cache"
    path.write_text('{"key": "a", "reply": "damaged"}\n')
    asked = []

    def ask():
        asked.append(1)
        return str(len(asked))

    for cache in (JudgeCache(path), JudgeCache(path)):
        assert cache.reply("a", ask, str.isdigit) == "1"
    assert JudgeCache(path).reply("a", _never) == "1"


def test_a_cache_reads_replies_of_other_processes_and_keeps_the_first(tmp_path):
    path = tmp_path / "cache"
    one, other = JudgeCache(path), JudgeCache(path)
    assert one.reply("a", lambda: other.reply("a", lambda: "first")) == "first"
    assert other.reply("b", lambda: "2") == "2"
    assert one.reply("b", _never) == "2"
    path.unlink()
    assert one.reply("b", _never) == "2"
    assert one.reply("c", lambda: "3") == "3"
    assert JudgeCache(path).reply("c", _never) == "3"


def test_threads_with_the_same_request_send_it_once(tmp_path):
    cache, asked = JudgeCache(tmp_path / "cache"), []
    begun = threading.Barrier(8)

    def ask():
        asked.append(1)
        time.sleep(0.05)
        return "1"

    def want(number):
        begun.wait()
        return cache.reply("same", ask), cache.reply(f"own {number}", lambda: str(number))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(want, range(8))) == [("1", str(number)) for number in range(8)]
    assert (len(asked), cache.hits, cache.misses) == (1, 7, 9)


def test_two_concurrent_processes_agree(tmp_path):
    path = tmp_path / "cache"
    writers = [_writer(path, name, 200) for name in ("one", "two")]
    said = [writer.communicate()[0].splitlines() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert len(said[0]) == 200
    assert said[0] == said[1]
    lines = path.read_bytes().splitlines()
    assert len({json.loads(line)["key"] for line in lines}) == len(lines) == 200


def test_a_killed_process_loses_no_results(tmp_path):
    path = tmp_path / "cache"
    writer = _writer(path, "killed", 1_000_000)
    had = [writer.stdout.readline() for _ in range(50)]
    os.kill(writer.pid, signal.SIGKILL)
    had += [line for line in writer.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    writer.wait()
    assert writer.returncode == -signal.SIGKILL
    cache = JudgeCache(path)
    assert len(had) >= 50
    for line in had:
        number, text = line.rstrip("\n").split(" ", 1)
        assert cache.reply(f"key {number}", _never) == text


def test_all_names_of_a_file_share_one_cache_and_an_unwritable_one_is_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert judge_cache("cache") is judge_cache(str(tmp_path / "cache"))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"judge\.cache: .*file/cache cannot be written"):
        judge_cache(str(tmp_path / "file" / "cache"))
    with pytest.raises(InputError, match="cannot be written"):
        JudgeCache(tmp_path)


@settings(deadline=None)
@given(st.lists(st.text()), st.lists(st.text()))
def test_keys_distinguish_all_parts(one, other):
    assert (request_key(*one) == request_key(*other)) == (one == other)
