"""`posttrain generate` with a model behind a server: failures are retried and listed, and no answer is lost."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.cli.main import main
from posttrain.runs.intervals import success_rate
from tests.rollout.chat_server import Reply, serving
from tests.training.preferences import write_jsonl
from tests.training.test_generate import lines_of

ROWS = 12
COMMAND = [sys.executable, "-c", "import sys; from posttrain.cli.main import main; sys.exit(main(sys.argv[1:]))"]


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"question {n}", "label": n * n} for n in range(ROWS)])


def words(url, *more):
    engine = ["engine.type=openai", f"engine.url={url}", "engine.model=some-model", "engine.retries=1"]
    return ["generate", f"data.test={Path.cwd() / 'rows.jsonl'}", *engine, "out=p.jsonl", "name=remote", *more]


def number(request):
    return int(request["messages"][-1]["content"].split()[-1])


def square(request):
    return Reply(str(number(request) ** 2), tokens=5)


def test_rows_are_answered_in_order_each_with_its_seed(tmp_path, capsys):
    def slow_first(request):
        reply = square(request)
        reply.delay = 0.3 if number(request) == 0 else 0.0
        return reply

    with serving(slow_first) as server:
        more = ["samples=2", "sampling.temperature=0.7", "system=Be brief.", "rollout.tokens_per_turn=9"]
        assert main(words(server.url, *more)) == 0
        asked = server.asked
    found = lines_of(tmp_path / "p.jsonl")
    assert [(row["id"], row["sample"]) for row in found] == [(n, s) for n in range(ROWS) for s in range(2)]
    assert all(row["prediction"] == row["reference"] == str(row["id"] ** 2) for row in found)
    assert {row["tokens"] for row in found} == {5}
    assert found[0]["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "question 0"}]
    assert sorted((number(request), request["seed"]) for request in asked) == sorted(
        (row["id"], row["seed"]) for row in found
    )
    assert {(request["temperature"], request["max_tokens"]) for request in asked} == {(0.7, 9)}
    assert "24 answers to 12 rows, 120 tokens" in capsys.readouterr().out


def test_failed_rows_are_retried_then_listed_and_resumed_alone(tmp_path, capsys):
    tries = {}

    def faulty(request):
        n = number(request)
        tries[n] = tries.get(n, 0) + 1
        statuses = {(1, 1): 429, (2, 1): 500, (4, tries[n]): 400, (5, tries[n]): 503}
        if n == 3:
            return Reply(body="<html>no JSON")
        if (n, tries[n]) in statuses:
            return Reply(status=statuses[n, tries[n]], body='{"error": "no"}')
        return square(request)

    with serving(faulty) as server:
        assert main(words(server.url)) == 1
        told = capsys.readouterr()
        assert "3 of 12 requests failed and are listed in p.jsonl.failed.jsonl, the first for rows.jsonl" in told.err
        assert len(told.err.splitlines()) == 1
        assert "9 answers to 9 rows" in told.out
        good = lines_of(tmp_path / "p.jsonl")
        assert [row["id"] for row in good] == [0, 1, 2, *range(6, ROWS)]
        missing = lines_of(tmp_path / "p.jsonl.failed.jsonl")
        assert [row["id"] for row in missing] == [3, 4, 5]
        assert "status 400" in missing[1]["error"]
        assert "status 503" in missing[2]["error"]
        assert (tries[1], tries[2], tries[5]) == (2, 2, 2)
        assert main(["generate", "--resume", "runs/remote"]) == 1, "the server has not changed"
        assert [row["id"] for row in lines_of(tmp_path / "p.jsonl.failed.jsonl")] == [3, 4, 5]
        server.model = square
        before = len(server.asked)
        capsys.readouterr()
        assert main(["generate", "--resume", "runs/remote"]) == 0
        assert sorted(map(number, server.asked[before:])) == [3, 4, 5]
    assert [row["id"] for row in lines_of(tmp_path / "p.jsonl")] == list(range(ROWS))
    assert [row for row in lines_of(tmp_path / "p.jsonl") if row["id"] not in (3, 4, 5)] == good
    assert not (tmp_path / "p.jsonl.failed.jsonl").exists()
    assert "9 from earlier runs" in capsys.readouterr().out


def test_a_server_that_is_down_ends_the_run_and_earlier_answers_are_kept(tmp_path, capsys):
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"question {n}"} for n in range(60)])

    def dies(request):
        return square(request) if number(request) < 5 else Reply(status=500, body="{}")

    more = ["engine.retries=0", "engine.max_concurrent=2"]
    with serving(dies) as server:
        assert main(words(server.url, *more)) == 1
        assert len(server.asked) < 30
    told = capsys.readouterr().err
    assert "16 consecutive requests failed" in told
    assert "5 of 60 answers are saved" in told
    assert [row["id"] for row in lines_of(tmp_path / "p.jsonl")] == list(range(5))
    # A run that wrote nothing leaves its name free.
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"question {n}"} for n in range(ROWS)])
    with serving(lambda request: Reply(status=500, body="{}")) as server:
        other = words(server.url, "engine.retries=0", "name=other", "out=other.jsonl")
        assert main(other) == 1
        assert not (tmp_path / "other.jsonl").exists()
        assert len(lines_of(tmp_path / "other.jsonl.failed.jsonl")) == ROWS
        server.model = square
        assert main([*other, "seed=3"]) == 0
        assert len(lines_of(tmp_path / "other.jsonl")) == ROWS
        assert not (tmp_path / "other.jsonl.failed.jsonl").exists()
    with serving(square) as server:
        assert main([*words(server.url, *more), "--resume", "runs/remote"]) == 2
        assert "a resumed run keeps its recipe" in capsys.readouterr().err


@contextlib.contextmanager
def waiting(folder, url, **streams):
    """A process of `generate` that has seven answers and waits for others."""
    command = [*COMMAND, *words(url, "engine.max_concurrent=3")]
    with subprocess.Popen(command, text=True, **streams) as process:
        journal = folder / "runs/remote/checkpoints/completions.jsonl"
        deadline = time.monotonic() + 120
        while not journal.exists() or journal.read_bytes().count(b"\n") < 8:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        yield process, journal


def slow(request):
    reply = square(request)
    reply.delay = 0.02 if number(request) < 7 else 30.0
    return reply


def test_killed_while_waiting_it_loses_and_repeats_nothing(tmp_path):
    with serving(square) as server:
        assert main(words(server.url, "out=whole.jsonl", "name=whole")) == 0
        server.model = slow
        with waiting(tmp_path, server.url) as (process, journal):
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert not (tmp_path / "p.jsonl").exists()
        with open(journal, "ab") as file:
            file.write(b'{"id": 8, "predic')
        server.model, before = square, len(server.asked)
        assert main(["generate", "--resume", "runs/remote"]) == 0
        assert sorted(map(number, server.asked[before:])) == list(range(7, ROWS))
    assert (tmp_path / "p.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_an_interruption_reports_what_is_kept_and_how_to_resume(tmp_path):
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with serving(slow) as server, waiting(tmp_path, server.url, **streams) as (process, _):
        process.send_signal(signal.SIGTERM)
        said, told = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "7 of 12 answers are saved; continue with `posttrain generate --resume runs/remote`" in said
    assert told.splitlines() == ["posttrain: interrupted"]


@pytest.mark.parametrize("thinking", ["keep", "remove"])
def test_thinking_of_a_server_is_kept_or_removed(thinking, tmp_path, capsys):
    replies = [
        Reply("plain"),
        Reply("<think>a b</think>\n\ntagged"),
        Reply("apart", message={"reasoning_content": "c d"}),
        Reply("", "length", message={"reasoning_content": "cut"}),
        Reply("<think>cut too", "length"),
        Reply("opened by the prompt</think>then"),
    ]
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"question {n}"} for n in range(len(replies))])
    with serving(lambda request: replies[number(request)]) as server:
        assert main(words(server.url, f"thinking={thinking}")) == 0
    found = lines_of(tmp_path / "p.jsonl")
    said = [row["prediction"] for row in found]
    if thinking == "keep":
        assert said[:2] == ["plain", "<think>a b</think>\n\ntagged"]
        assert said[2:5] == ["<think>c d</think>apart", "<think>cut", "<think>cut too"]
        assert said[5:] == ["opened by the prompt</think>then"]
        assert "thinking_characters" not in found[0]
        return
    assert said == ["plain", "tagged", "apart", "", "", "then"]
    assert [row["thinking_characters"] for row in found] == [0, len("<think>a b</think>\n\n"), 3, 3, 14, 28]
    assert "thinking removed from 5 answers; 2 had nothing else" in capsys.readouterr().out


def test_the_plan_and_the_keys_without_effect(capsys):
    more = ["--dry-run", "model.path=elsewhere", "window=3", "rollout.tokens_per_episode=600"]
    with serving(square) as server:
        assert main(words(server.url, *more)) == 0
        assert not server.asked
    said = capsys.readouterr().out
    assert f"some-model at {server.url}, 8 requests in flight" in said
    for key in ("model", "window", "rollout.tokens_per_episode"):
        assert f"warning: {key} has no effect" in said
    assert main(words("http://nowhere/v1", "sampling.top_k=5", "sampling.temperature=1")) == 2
    assert "engine.extra_body.top_k=5" in capsys.readouterr().err


def test_no_torch_is_loaded():
    with serving(square) as server:
        run = f"import sys; from posttrain.cli.main import main; assert main({words(server.url)!r}) == 0; "
        code = run + "print('loaded:', [name for name in ('torch', 'transformers') if name in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert "loaded: []" in done.stdout


def test_the_journal_names_a_damaged_line(tmp_path, capsys):
    with serving(square) as server:
        assert main(words(server.url)) == 0
    journal = tmp_path / "runs/remote/checkpoints/completions.jsonl"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([*lines[:2], json.dumps({"id": None}), *lines[3:]]) + "\n")
    assert main(["generate", "--resume", "runs/remote"]) == 1
    assert "completions.jsonl, line 3 is damaged" in capsys.readouterr().err


def test_a_file_that_another_run_wrote_meanwhile_is_unchanged(tmp_path, capsys):
    out, journal = tmp_path / "p.jsonl", tmp_path / "runs/remote/checkpoints/completions.jsonl"

    def meanwhile(request):
        out.write_text("theirs")
        return square(request)

    with serving(meanwhile) as server:
        assert main(words(server.url)) == 1
        told = capsys.readouterr().err
        assert "p.jsonl has lines that this run did not write" in told
        assert re.search(r"completions\.jsonl\. .*`--resume`", told)
        assert main(["generate", "--resume", "runs/remote"]) == 1, "before anything is asked"
        assert (out.read_text(), len(lines_of(journal))) == ("theirs", 1 + ROWS)
        out.rename(tmp_path / "away.jsonl")
        assert main(["generate", "--resume", "runs/remote"]) == 0
        assert [row["id"] for row in lines_of(out)] == list(range(ROWS))
        out.write_text("theirs again")
        assert main(["generate", "--resume", "runs/remote"]) == 1, "a finished run too"
        assert out.read_text() == "theirs again"
        assert len(server.asked) == ROWS
        assert main(words(server.url, "--overwrite")) == 0
        assert len(lines_of(out)) == ROWS


def test_the_share_of_truncated_answers_has_an_interval_over_rows(tmp_path, capsys):
    def half_of_them(request):
        return Reply("x", tokens=5, reason="length" if number(request) % 2 else "stop")

    with serving(half_of_them) as server:
        assert main(words(server.url, "samples=8", "sampling.temperature=1", "rollout.tokens_per_turn=5")) == 0
    last = lines_of(tmp_path / "runs/remote/metrics.jsonl")[-1]
    low, high = last["generate/truncated_low"], last["generate/truncated_high"]
    rows, answers = success_rate(ROWS // 2, ROWS), success_rate(4 * ROWS, 8 * ROWS)
    assert (last["generate/truncated_share"], low, high) == pytest.approx((0.5, rows.low, rows.high))
    assert high - low > 2 * (answers.high - answers.low)
    assert (
        f"48 of 96 truncated at rollout.tokens_per_turn = 5: 50.0% [{low:.1%}, {high:.1%}]" in capsys.readouterr().out
    )


def test_an_endpoint_that_behaves_like_that_of_anthropic(tmp_path, monkeypatch, capsys):
    """Bearer key, a required token limit, ignored fields, and a model that rejects a temperature."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of-mine")

    def claude(request):
        if "temperature" in request:
            return Reply(status=400, body='{"error": {"message": "temperature is deprecated for this model"}}')
        if request["model"] != "claude-sonnet-5":
            return Reply(status=404, body='{"error": {"type": "not_found_error", "message": "model: x"}}')
        return square(request) if "max_tokens" in request else Reply(status=400, body="{}")

    with serving(claude) as server:
        keys = ["engine.api_key_variable=ANTHROPIC_API_KEY", "engine.max_concurrent=4"]
        command = [*words(server.url + "/", *keys), "engine.model=claude-sonnet-5"]
        assert main(command) == 1
        assert "temperature is deprecated for this model" in capsys.readouterr().err
        assert main([*command, "engine.extra_body.temperature=null", "--overwrite"]) == 0
        assert {request["key"] for request in server.asked} == {"Bearer of-mine"}
        assert {request["path"] for request in server.asked} == {"/v1/chat/completions"}
        command = [*command[:-1], "engine.model=claude-3-7-sonnet-20250219", "engine.extra_body.temperature=null"]
        assert main([*command, "name=old", "out=old.jsonl"]) == 1
        assert "status 404" in capsys.readouterr().err
    assert [row["prediction"] for row in lines_of(tmp_path / "p.jsonl")] == [str(n * n) for n in range(ROWS)]
