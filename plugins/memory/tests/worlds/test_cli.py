"""`posttrain data worlds`: files that can be read back, tables, and complaints."""

import json

import pytest

from posttrain.cli.main import main
from posttrain_memory.worlds.generation import read_row


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")


def test_rows_and_columns_of_each_split(tmp_path, capsys):
    words = ["--train", "2", "--dev", "1", "--test", "1", "--jsonl", "notes=5", "facts=[2,3]", "bare=true"]
    assert main(["data", "worlds", "--out", "w", *words]) == 0
    out = capsys.readouterr().out
    worlds = {}
    for split in ("train", "dev", "test"):
        rows = [json.loads(line) for line in (tmp_path / "w" / f"worlds_{split}.jsonl").read_text().splitlines()]
        worlds[split] = {row["world"] for row in rows}
        (line,) = (line for line in out.splitlines() if f"w/worlds_{split}.jsonl:" in line)
        assert f"{len(rows)} tasks in {len(worlds[split])} worlds" in line
        assert f"{sum(row['kind'] == 'clarification' for row in rows)} clarification" in line
        for row in rows:
            task, files = read_row(row)
            assert len(files) == 5
            assert task.question == row["context_messages"][0]["content"]
    assert not worlds["train"] & worlds["dev"]
    assert not worlds["test"] & (worlds["train"] | worlds["dev"])


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("nodes=4", "the nearest is environment.worlds.notes"),
        ("notes=2", "notes"),
        ("facts=[3,2]", "exchange"),
        ("facts=[0,2]", "at least one fact"),
        ("themes=[none]", "theme"),
    ],
)
def test_wrong_keys_are_reported(word, told, capsys):
    assert main(["data", "worlds", word]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
