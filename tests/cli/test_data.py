"""`posttrain data`: how rows are shown."""

import json
from pathlib import Path

import pytest

from posttrain.cli.main import main
from posttrain.data.files import write_rows
from tests.training.preferences import pair_rows, unpaired_rows, write_jsonl


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")


def inspected(capsys, *words):
    assert main(["data", "inspect", *words]) == 0
    return capsys.readouterr().out


def test_pairs_are_shown_side_by_side_with_lengths_and_problems(tiny_model, tmp_path, capsys):
    rows = [*pair_rows(6), {"chosen": "x"}]
    out = inspected(capsys, write_jsonl(tmp_path / "p.jsonl", rows), f"model.path={tiny_model}", "--rows", "1")
    assert "p.jsonl row 1 chosen (" in out
    assert "p.jsonl row 1 rejected (" in out
    assert "6 usable rows (pair)" in out
    assert "1 row dropped: " in out
    assert "p.jsonl row 7" in out


def test_kinds_are_inferred_from_the_columns(tiny_model, tmp_path, capsys):
    asked = [{"question": "Up?", "answer": "Goal"}]
    keys = ["columns.prompt=question", "columns.completion=answer", f"model.path={tiny_model}"]
    assert "1 usable rows (conversation)" in inspected(capsys, write_jsonl(tmp_path / "q.jsonl", asked), *keys)
    whole = ["data.columns.prompt=question", *keys[1:]]
    assert "1 usable rows (conversation)" in inspected(capsys, str(tmp_path / "q.jsonl"), *whole)
    judged = write_jsonl(tmp_path / "v.jsonl", unpaired_rows(3))
    assert "6 usable rows (unpaired)" in inspected(capsys, judged, f"model.path={tiny_model}")


def test_columns_of_no_known_kind_are_reported(tiny_model, tmp_path, capsys):
    file = write_jsonl(tmp_path / "x.jsonl", [{"a": 1, "b": 2}])
    said = refused(capsys, tiny_model, file)
    assert said.startswith("the columns a, b are not those of conversations, pairs or unpaired answers; name them")
    turns = [{"from": "human", "value": "Up?"}, {"from": "gpt", "value": "Goal"}]
    file = write_jsonl(tmp_path / "s.jsonl", [{"id": "1", "conversations": turns}])
    assert refused(capsys, tiny_model, file).endswith("name them, for example `columns.messages=conversations`")
    out = inspected(capsys, file, "columns.messages=conversations", f"model.path={tiny_model}")
    assert "1 usable rows (conversation)" in out


def refused(capsys, tiny_model, file, *words):
    assert main(["data", "inspect", str(file), *words, f"model.path={tiny_model}"]) == 2
    return capsys.readouterr().err.removeprefix(f"posttrain: {file}: ").rstrip()


def test_files_without_rows_are_reported_by_reason(tiny_model, tmp_path, capsys):
    whole = tmp_path / "whole.parquet"
    write_rows(whole, [{"messages": row["chosen"]} for row in pair_rows(50)])
    cut, empty = tmp_path / "cut.parquet", tmp_path / "empty.jsonl"
    cut.write_bytes(whole.read_bytes()[:-50])
    empty.write_text("\n")
    said = refused(capsys, tiny_model, cut)
    assert said.startswith("no usable row; 1 problem, most often broken file (cut.parquet): not a complete parquet")
    assert said.endswith("replace the file, or remove it from the recipe")
    assert refused(capsys, tiny_model, empty) == "no rows; name a file that has rows"
    (tmp_path / "broken.jsonl").write_text('{"messages": [')
    assert "most often broken JSON (broken.jsonl row 1)" in refused(capsys, tiny_model, tmp_path / "broken.jsonl")
    # Beside a whole file, the broken one is a problem among others.
    empty.unlink()
    (tmp_path / "broken.jsonl").unlink()
    assert "50 usable rows (conversation)" in inspected(capsys, str(tmp_path), f"model.path={tiny_model}")


def test_labels_as_words_are_reported(tiny_model, tmp_path, capsys):
    rows = [{**row, "label": "good" if row["label"] else "bad"} for row in unpaired_rows(2)]
    said = refused(capsys, tiny_model, write_jsonl(tmp_path / "v.jsonl", rows))
    assert "most often label is neither true nor false (v.jsonl row 1, " in said
    assert "`label` is 'good'; write true or false, or 1 or 0" in said
    for words in (("true", "false"), ("1", "0"), (1, 0)):
        rows = [{**row, "label": words[not row["label"]]} for row in unpaired_rows(2)]
        out = inspected(capsys, write_jsonl(tmp_path / "v.jsonl", rows), f"model.path={tiny_model}")
        assert "4 usable rows (unpaired)" in out
    # Right answers in a column of that name are no verdicts, although one of them is 1.
    rows = [{"prompt": "q", "completion": "a", "label": str(n)} for n in range(1, 4)]
    out = inspected(capsys, write_jsonl(tmp_path / "v.jsonl", rows), f"model.path={tiny_model}")
    assert "3 usable rows (conversation)" in out


@pytest.mark.parametrize("history", ["episode", "turn"])
def test_experts_write_rows_that_sft_trains_on_and_plays(history, tiny_model, tmp_path, capsys):
    words = ["slippery=false", "--count", "5", "--history", history, "--out", "lake.jsonl"]
    assert main(["data", "experts", "frozen_lake", *words]) == 0
    assert "of 5 episodes, seeds 200000 to 200004" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "lake.jsonl").read_text().splitlines()]
    assert json.loads(rows[0]["environment"])["format"]["thinking"] is False
    assert len({row["seed"] for row in rows}) == 5
    words = ["data.train=lake.jsonl", "data.held_out=1", f"model.path={tiny_model}", "data.cache=cache"]
    words += ["environment.type=frozen_lake", "environment.slippery=false", "evaluation.seeds.count=2"]
    words += ["evaluation.final_seeds.count=3", "rollout.tokens_per_turn=4", "rollout.tokens_per_episode=1200"]
    assert main(["sft", *words]) == 0
    results = json.loads((tmp_path / "runs" / "run" / "results.json").read_text())
    policies = ["random policy", "start of this run", "trained model", "optimal policy"]
    assert [row["policy"] for row in results["policies"]] == policies
    assert results["tables"][0]["headings"][2] == "loss"
    assert "were generated with" not in (tmp_path / "runs" / "run" / "report.md").read_text()
    if history == "episode":
        assert main(["sft", *words, "name=thinks", "environment.format.thinking=true", "steps=1"]) == 0
        report = (tmp_path / "runs" / "thinks" / "report.md").read_text()
        assert "environment.format.thinking false (here true)" in report


def test_experts_refuse_held_out_seeds_other_formats_and_environments_without_tasks(capsys):
    assert main(["data", "experts", "frozen_lake", "--start", "999990", "--count", "20"]) == 2
    assert "overlap evaluation.seeds" in capsys.readouterr().err
    assert main(["data", "experts", "frozen_lake", "--count", "3", "--out", "lake.csv"]) == 2
    assert capsys.readouterr().err == "posttrain: lake.csv: unknown format; name a .jsonl or .parquet file\n"
    assert main(["data", "experts", "text_task"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("posttrain: text_task has no default task")
    assert "reasoning_gym.dataset" in said
    assert said.count("\n") == 1
    asked = write_jsonl(Path("asked.jsonl"), [{"prompt": "Up?", "completion": "Goal"}])
    assert main(["data", "experts", "text_task", f"prompts={asked}"]) == 2
    assert "--start and --count: environment seed 200000 is not a row of" in capsys.readouterr().err
    words = ["--start", "0", "--count", "1", "--out", "asked.parquet"]
    assert main(["data", "experts", "text_task", f"prompts={asked}", *words]) == 0
    assert capsys.readouterr().out == "asked.parquet: 1 rows of 1 episodes, seeds 0 to 0\n"
