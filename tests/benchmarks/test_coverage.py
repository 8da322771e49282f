"""The table of what the users of the four documents do: its rows, and that it can fail."""

import ast
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from posttrain.cli.main import main

ROOT = Path(__file__).parents[2]

ROWS = yaml.safe_load((ROOT / "benchmarks/coverage.yaml").read_text(encoding="utf-8"))
WORKS = {"document": "rlhf-rationales", "expected": "works"}


@cache
def functions(file):
    return {node.name for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body if hasattr(node, "name")}


def test_there_are_100_rows_and_what_shows_them_exists(capsys):
    assert [row["row"] for row in ROWS] == list(range(1, 101))
    for row in ROWS:
        assert re.fullmatch(r"works|waits for .+|(works|partial|fails) as measured", row["expected"])
        assert ("measured" in row) == row["expected"].endswith("as measured")
        assert row["shown_by"] or row["expected"] != "works"
        for shown in row["shown_by"]:
            if shown.startswith("posttrain "):
                verbs = [word for word in shlex.split(shown)[1:3] if re.fullmatch(r"[a-z]+", word)]
                assert main([*verbs, "--help"]) == 0
            else:
                file, name = shown.split("::")
                assert name in functions(file), shown
    capsys.readouterr()


def test_measured_numbers_are_those_of_the_results():
    page = (ROOT / "docs/results/index.md").read_text(encoding="utf-8").replace("**", "")
    results = " ".join(page.split())
    measured = [row["measured"] for row in ROWS if "measured" in row]
    assert len(measured) >= 3
    for text in measured:
        quoted = re.findall(r"\d+\.\d+%? \[[^\]]+\]|\d+\.\d+%?", text)
        assert quoted
        assert [number for number in quoted if number not in results] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_missing_output_a_failing_command_and_an_unknown_test_fail(tmp_path):
    made = "posttrain data rationales --out made --train 4 --val 2 --test 2"
    plan = "posttrain rl recipes/ragen/bandit.yaml --dry-run"
    rows = [
        {"row": 1, "does": "a", "shown_by": [made], "makes": ["made/sft/*_train.parquet"], **WORKS},
        {"row": 2, "does": "b", "shown_by": [made], "makes": ["made/gone.parquet"], **WORKS},
        {"row": 3, "does": "c", "shown_by": [plan], "prints": ["no such text"], **WORKS},
        {"row": 4, "does": "d", "shown_by": ["posttrain rl no_such.yaml"], **WORKS},
        {"row": 5, "does": "e", "shown_by": ["tests/cli/test_main.py::test_the_version_is_one_line"], **WORKS},
        {"row": 6, "does": "f", "shown_by": ["tests/cli/test_main.py::test_gone"], **WORKS},
        {"row": 7, "does": "g", "shown_by": [], **WORKS},
        {"row": 8, "does": "h", "shown_by": [plan], **WORKS, "expected": "waits for a GPU"},
        {"row": 9, "does": "i", "shown_by": [plan], **WORKS, "expected": "fails as measured", "measured": "It fell"},
    ]
    (tmp_path / "rows.yaml").write_text(yaml.safe_dump(rows))
    command = [sys.executable, "benchmarks/coverage.py", "--rows", str(tmp_path / "rows.yaml")]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "page.md")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.strip() == (tmp_path / "page.md").read_text().strip()
    states = dict(re.findall(r"^\| (\d) \|.*\| ([^|]+) \|$", done.stdout, re.M))
    assert states == {
        "1": "works",
        "2": "FAILS: made/gone.parquet was not made",
        "3": 'FAILS: "no such text" was not printed',
        "4": states["4"],
        "5": "works",
        "6": "FAILS: tests/cli/test_main.py::test_gone was not run",
        "7": "FAILS: no command and no test shows it",
        "8": "waits for a GPU",
        "9": "fails as measured. It fell",
    }
    asserted = dict(re.findall(r"^\| (\d) \|.*\| ([^|]+) \| [^|]+ \|$", done.stdout, re.M))
    assert asserted["1"] == "exit status 0 of the command; files `made/sft/*_train.parquet`"
    assert asserted["3"] == "exit status 0 of the command; printed: `no such text`"
    assert asserted["5"] == "test: the version is one line"
    assert asserted["7"] == "–"
    assert re.match(r"FAILS: .*no_such.yaml", states["4"])
    assert "| rlhf-rationales | 9 | 2 | 0 | 1 | 1 | 5 |" in done.stdout
    only = subprocess.run([*command, "--only", "7"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert len(re.findall(r"^\| \d \|", only.stdout, re.M)) == 1
