"""A key that a server repeats is in no file, report or output of a command."""

import itertools
import json

import pytest

from posttrain.cli.main import main
from posttrain.rollout.store import zstd
from tests.rollout.chat_server import Reply, serving

KEY = "sk-posttrain-0123456789abcdef"


def repeating():
    """A model that refuses every other request, and names the key that it was asked with."""
    numbers = itertools.count()
    body = {"error": {"message": f"Incorrect API key provided: {KEY}. Bearer {KEY} was sent.", "key": KEY}}
    answers = [Reply(json.dumps({"score": 1.0, "reason": "r"})), Reply(status=401, body=json.dumps(body))]
    return lambda request: answers[next(numbers) % 2]


@pytest.fixture
def left_behind(tmp_path, monkeypatch, capfd):
    """A function that runs commands in an empty folder and returns every byte that they write."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TEST_API_KEY", KEY)
    rows = [{"prompt": f"Say word {n}.", "completion": "x", "prediction": "y", "reference": "x"} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*commands):
        for command in commands:
            main(command)
        said = capfd.readouterr()
        files = {file: content_of(file) for file in tmp_path.rglob("*") if file.is_file()}
        return files, said.out + said.err

    return run


def content_of(file):
    content = file.read_bytes()
    return zstd.decompress(content) if file.suffix == ".zst" else content


def check(files, said, *names):
    assert all(any(file.name == name for file in files) for name in names), sorted(files)
    assert "401" in said
    assert KEY not in said
    assert [file for file, content in files.items() if KEY.encode() in content] == []


def test_a_judge_that_repeats_the_key_of_a_run(tiny_model, left_behind):
    with serving(repeating()) as server:
        judge = {"url": server.url, "model": "m", "rubric": "Good?", "retries": 0, "api_key_variable": "TEST_API_KEY"}
        words = ["environment.type=text_task", "environment.prompts=rows.jsonl"]
        words += [f"environment.judge={json.dumps(judge)}", f"model.path={tiny_model}", "steps=1"]
        words += ["rollout.tokens_per_turn=4", "rollout.failures.max_share=1.0", "rollout.groups_per_step=4"]
        words += ["rollout.episodes_per_group=2", "evaluation.held_out=8", "name=own"]
        files, said = left_behind(["rl", *words], ["report", "runs/own"], ["episodes", "runs/own", "--step", "1"])
    check(files, said, "recipe.yaml", "metrics.jsonl", "report.md", "report.html", "step_000001.train.jsonl.zst")


def test_a_model_and_a_judge_of_predictions_that_repeat_the_key(left_behind):
    with serving(repeating()) as server:
        words = ["engine.type=openai", f"engine.url={server.url}", "engine.model=m", "engine.retries=0"]
        words += ["engine.api_key_variable=TEST_API_KEY", "data.test=rows.jsonl", "out=answers.jsonl", "name=answers"]
        judge = [f"judge.url={server.url}", "judge.model=m", "judge.api_key_variable=TEST_API_KEY"]
        asked = ["evaluate", "judge", "rows.jsonl", "--rubric", "efficiency", *judge, "--out", "judged.json"]
        files, said = left_behind(["generate", *words], asked)
    check(files, said, "answers.jsonl")
