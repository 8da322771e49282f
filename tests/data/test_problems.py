"""Counts and summaries of the problems of rows."""

import json

import pytest

from posttrain.data.examples import load_dataset
from posttrain.data.problems import BROKEN_FILE, SHOWN, Problems
from posttrain.errors import InputError


def counted(*rows: tuple[str, str, str]) -> Problems:
    problems = Problems()
    for category, origin, detail in rows:
        problems.add(category, origin, detail)
    return problems


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        (
            [("empty answer", f"train.jsonl row {n}", "") for n in range(1, SHOWN + 3)],
            ["7 rows dropped: empty answer (train.jsonl row 1, row 2, row 3, row 4, row 5 and 2 more)"],
        ),
        (
            [("null", "a.jsonl row 4", ""), ("null", "b.jsonl row 9", ""), ("null", "b.jsonl row 11", "")],
            ["3 rows dropped: null (a.jsonl row 4, b.jsonl row 9, row 11)"],
        ),
        (
            [("null", "a row 1", "in `x`"), ("role", "a row 2", "elf"), ("role", "a row 3", "orc")],
            ["2 rows dropped: role (a row 2, row 3; first: elf)", "1 row dropped: null (a row 1; first: in `x`)"],
        ),
        ([(BROKEN_FILE, "a.parquet", "")], ["1 file dropped: broken file (a.parquet)"]),
        (
            [("null", "caf\udce9.jsonl row 1", "a\nb \ud800")],
            [r"1 row dropped: null (caf\udce9.jsonl row 1; first: a b \ud800)"],
        ),
    ],
)
def test_summary_lines_name_each_file_once_and_the_most_frequent_problem_first(rows, lines):
    assert counted(*rows).summary() == lines
    assert counted(*rows).total == len(rows)


def test_notes_do_not_fail_the_run_and_counts_are_split_stored_and_added():
    problems = Problems()
    problems.note("cut to data.max_tokens", "a.jsonl row 7")
    assert problems.summary() == ["1 row cut to data.max_tokens (a.jsonl row 7)"]
    assert problems.total == 0
    problems.raise_if(strict=True)
    problems = Problems()
    problems.add_text("wrong role: message 2: elf", "a row 1")
    problems.add_text("wrong role", "a row 2")
    assert problems.summary() == ["2 rows dropped: wrong role (a row 1, row 2; first: message 2: elf)"]
    problems = counted(("null", "a row 1", "in `x`"), ("wrong role", "a row 2", ""))
    problems.note("cut", "a row 3")
    problems.used = 5
    back = Problems()
    back.include(json.loads(json.dumps(problems.state())))
    assert (back.summary(), back.total, back.used) == (problems.summary(), 2, 5)
    back.add("null", "a row 9")
    assert problems.total == 2
    first = counted(*[("null", f"a row {n}", "") for n in range(1, 5)])
    second = counted(*[("null", f"b row {n}", "") for n in range(1, 5)], ("wrong role", "b row 9", ""))
    second.used = 3
    first.include(second.state())
    assert first.summary() == [
        "8 rows dropped: null (a row 1, row 2, row 3, row 4, b row 1 and 3 more)",
        "1 row dropped: wrong role (b row 9)",
    ]
    assert first.used == 3
    first.add("wrong role", "c row 1")
    assert second.total == 5


def test_errors_name_the_first_or_the_most_frequent_problem():
    problems = counted(("null", "a.jsonl row 4", "in `x`"), ("wrong role", "a.jsonl row 5", ""))
    problems.raise_if(strict=False)
    with pytest.raises(InputError, match=r"^a\.jsonl row 4: null: in `x`; 1 more problem.*strict: false"):
        problems.raise_if(strict=True)
    Problems().raise_if(strict=True)
    problems = counted(("null", "a row 1", ""), ("wrong role", "a row 2", "elf"), ("wrong role", "a row 3", ""))
    with pytest.raises(InputError, match=r"^a, b: no usable row; 3 problems.*role \(a row 2, row 3\): elf"):
        problems.require_any("a, b")
    with pytest.raises(InputError, match=r"^a: no usable row; 1 problem, .* broken file \(a\): cut"):
        counted((BROKEN_FILE, "a", "cut")).require_any("a")
    with pytest.raises(InputError, match=r"^a, b: no rows"):
        Problems().require_any("a, b")


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (
            b'{"prompt": "a", "completion" "b"}\n',
            r"Expecting ':' delimiter at character 30 of the line; correct the data$",
        ),
        (b'{"prompt": "a", "comp\n', r"Unterminated string starting at character 17 of the line; correct the data$"),
        ('{"prompt": "caf\xe9"}\n'.encode("latin-1"), r"byte 0xe9 at position 16 of the line; save the file as UTF-8$"),
        (b'{"question": "a"}\n', r"; correct the data, or set its column names in `columns`$"),
    ],
)
def test_the_remedy_fits_the_problem(content, remedy, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=remedy):
        load_dataset(tmp_path / "rows.jsonl")
