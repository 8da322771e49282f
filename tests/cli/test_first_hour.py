"""The output that a new user reads before and after a run: the plan on one screen, the reference of keys, the rows."""

import json
import re

import pytest

from posttrain.cli.main import main
from posttrain.recipe.reference import keys_of
from posttrain.recipe.stages import STAGES
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
    parts = ["model", "batches", "memory", "checks"]
    assert [line for line in short if line in parts] == parts
    assert "add --full" in short[-1]
    code, full = in_terminal(*words, "--full", width=80)
    assert len(full) > 200
    assert "rollout:" in full
    # No word is broken at the edge of the screen.
    _, wide = in_terminal(*words, "--on", "h200", width=400)
    assert "".join(short).replace(" ", "") == "".join(wide).replace(" ", "")
    assert set(" ".join(short).split()) == set(" ".join(wide).split())


def test_full_needs_a_dry_run(capsys):
    assert main(["rl", "--full"]) == 2
    assert "--full has an effect only with --dry-run" in capsys.readouterr().err


@pytest.mark.parametrize("width", [60, 80])
def test_the_reference_of_keys_never_breaks_a_word(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["recipe", "rollout"]) == 0
    printed = capsys.readouterr().out
    described = [key for key in keys_of(STAGES["rl"]) if key.path.startswith("rollout.")]
    known = {
        word for key in described for word in f"{key.path} {key.default} {key.description} {key.variant} For".split()
    }
    known |= {word for key in described for word in f"Must be {key.allowed}. = {key.variant}.".split()}
    assert len(described) > 20
    assert set(printed.split()) <= known
    assert max(len(line) for line in printed.splitlines() if line.startswith(" ")) <= width


@pytest.fixture
def supervised(tiny_model, rows):
    """A folder with the run `runs/s`, which has trained on the rows for a step."""
    words = ["sft", "data.train=chat.jsonl", f"model.path={tiny_model}", "steps=1", "name=s", "plots=false"]
    assert main([*words, "checkpoint.keep_state=always"]) == 0
    return rows


def test_the_episodes_of_a_supervised_run_are_its_rows(supervised, capsys):
    capsys.readouterr()
    assert main(["episodes", "runs/s", "--limit", "2"]) == 0
    printed = capsys.readouterr().out
    assert "chat.jsonl row 2" in printed
    assert "chat.jsonl row 3" not in printed
    assert "12 usable rows (conversation)" in printed


def test_a_resume_from_another_folder_names_the_first_one(supervised, capsys, monkeypatch):
    rows = supervised
    (rows / "other").mkdir()
    monkeypatch.chdir(rows / "other")
    capsys.readouterr()
    assert main(["sft", "--resume", "../runs/s", "steps=2"]) == 2
    assert capsys.readouterr().err.strip().endswith(f"; the run was started in {rows}, so resume it there")
    monkeypatch.chdir(rows)
    assert main(["sft", "--resume", "runs/s", "steps=2"]) == 0


def test_one_step_is_one_step(tiny_model, tmp_path, capsys):
    assert (
        main(["rl", "environment.type=bandit", f"model.path={tiny_model}", "steps=1", "--dry-run", f"runs={tmp_path}"])
        == 0
    )
    printed = capsys.readouterr().out
    assert "evaluation.every has no effect: the run ends after 1 step\n" in printed
    assert "  1 step: 64 episodes and 1 optimizer step\n" in printed
    assert not re.search(r"\b1 (steps|updates|episodes|rows)\b", printed)
