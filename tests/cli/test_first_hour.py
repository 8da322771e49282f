"""The output that a new user reads before and after a run: the plan on one screen, the reference of keys, the rows."""

import json

import pytest

from posttrain.cli.main import main
from tests.terminal import in_terminal


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """A folder with twelve conversations, in which commands run."""
    monkeypatch.chdir(tmp_path)
    lines = [
        {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"{n}."}]}
        for n in range(12)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_a_dry_run_is_one_screen_and_the_rest_is_optional(tiny_model, tmp_path):
    words = ["rl", "environment.type=bandit", f"model.path={tiny_model}", "--dry-run", f"runs={tmp_path}"]
    code, short = in_terminal(*words, "--on", "h200", width=80)
    assert code == 0
    assert len(short) <= 40
    parts = ["batches", "memory", "checks"]
    assert [line for line in short if line in parts] == parts
    subjects = [line.split(":")[0] for line in short if line.startswith(("environment:", "tasks:", "model:"))]
    assert subjects == ["environment", "tasks", "model"]
    assert "add --full" in short[-1]
    code, full = in_terminal(*words, "--full", width=80)
    assert len(full) > 200
    assert "rollout:" in full
    # No word is broken at the edge of the screen.
    _, wide = in_terminal(*words, "--on", "h200", width=400)
    assert "".join(short).replace(" ", "") == "".join(wide).replace(" ", "")
    assert set(" ".join(short).split()) == set(" ".join(wide).split())


@pytest.fixture
def supervised(tiny_model, rows):
    """A folder with the run `runs/s`, which has trained on the rows for a step."""
    words = ["sft", "data.train=chat.jsonl", f"model.path={tiny_model}", "steps=1", "name=s", "plots=false"]
    assert main([*words, "checkpoint.keep_state=always"]) == 0
    return rows


def test_a_supervised_run_names_the_command_for_its_rows_and_the_folder_to_resume_in(supervised, capsys, monkeypatch):
    capsys.readouterr()
    assert main(["episodes", "runs/s"]) == 2
    assert "`posttrain data inspect FILE` shows its rows" in capsys.readouterr().err
    rows = supervised
    (rows / "other").mkdir()
    monkeypatch.chdir(rows / "other")
    capsys.readouterr()
    assert main(["sft", "--resume", "../runs/s", "steps=2"]) == 2
    assert capsys.readouterr().err.strip().endswith(f"; the run was started in {rows}, so resume it there")
    monkeypatch.chdir(rows)
    assert main(["sft", "--resume", "runs/s", "steps=2"]) == 0
